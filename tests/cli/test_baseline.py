"""`eval_rouge --baseline`: two checkpoints, files and built-in baselines, on the same examples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from t5_fsdp.evaluation.text_statistics import STATISTICS
from tests.conftest import tiny_options, write_jsonl

ROWS = [
    {"id": "a", "document": "Rinse rice. Cut it. Eat.", "reference": "Rinse the rice",
     "prediction": "Rinse rice"},
    {"id": "b", "document": "Open doors. Close lamps.", "reference": "Close the lamps",
     "prediction": "Open doors"},
]  # fmt: skip


@pytest.fixture(scope="module")
def steps(pools: Any, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The checkpoints of steps 6 and 12 of a run."""
    run_dir = tmp_path_factory.mktemp("compared") / "run"
    options = {"checkpoint.every_steps": 6, "train.max_steps": 12, "evaluation.max_examples": 2}
    code, _, err = pools(1).command("train", tiny_options(corpus, run_dir, **options))
    assert code == 0, err
    found = [run_dir / "checkpoints" / f"step-{step:08d}" for step in (6, 12)]
    assert all(map(Path.is_dir, found))
    return found


def evaluate(pools: Any, *argv: Any, world_size: int = 1) -> str:
    code, out, err = pools(world_size).command("eval_rouge", list(argv))
    assert code == 0, err
    return out


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def predictions_in(folder: Path) -> list[str]:
    lines = (folder / "predictions.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["prediction"] for line in lines]


def test_two_checkpoints_are_compared(pools: Any, steps: list[Path], tmp_path: Path) -> None:
    first, last = steps
    argv = ["--checkpoint", last, "--baseline", first, "--output_dir", tmp_path]
    out = evaluate(pools, *argv, world_size=2)
    assert f"difference to {first}" in out and "win / tie / lose" in out and "example row-" in out
    found = read(tmp_path / "comparison.json")
    assert (found["examples"], found["system"], found["baseline"]) == (11, "model", str(first))
    metric = found["metrics"]["rouge1"]
    assert metric["wins"] + metric["ties"] + metric["losses"] == 11
    assert metric["fmeasure"] == read(tmp_path / "rouge.json")["scores"]["rouge1"]["fmeasure"]
    # The baseline's summaries are those of an evaluation of its own, on another number of ranks.
    evaluate(pools, "--checkpoint", first)
    own = first.parent.parent / "evaluation" / "step-00000006" / "test"
    assert predictions_in(tmp_path / "baseline") == predictions_in(own)
    assert metric["baseline_fmeasure"] == read(own / "rouge.json")["scores"]["rouge1"]["fmeasure"]
    # Training's validation says as much about its summaries, but for the checkpoint, of which
    # there was none yet.
    settings = read(own / "rouge.json")["settings"]
    assert len(settings.pop("model_digest")) == 32
    validation = last.parent.parent / "evaluation" / last.name / "validation"
    assert read(validation / "rouge.json")["settings"] == settings
    assert {"prefix", "max_source_tokens", "keep_newlines", "param_dtype"} < settings.keys()
    # They are not generated twice, but with other settings they are.
    again = evaluate(pools, *argv)
    assert f"predictions of {first}: {own}" in again and "summarizing" not in again
    assert read(tmp_path / "comparison.json") == found
    assert "summarizing 11 documents" in evaluate(pools, *argv, "--evaluation.num_beams", 1)


def test_a_file_is_compared_with_a_checkpoint(
    pools: Any, steps: list[Path], tmp_path: Path
) -> None:
    path = write_jsonl(tmp_path / "mine.jsonl", ROWS)
    argv = ["--predictions", path, "--baseline", steps[1], "--output_dir", tmp_path / "out"]
    assert "summarizing 2 documents" in evaluate(pools, *argv, world_size=2)
    assert read(tmp_path / "out" / "comparison.json")["examples"] == 2
    rows = (tmp_path / "out" / "predictions.jsonl").read_text().splitlines()
    assert set(STATISTICS) < json.loads(rows[0]).keys()
    assert f"predictions of {steps[1]}: {tmp_path}" in evaluate(pools, *argv)


@pytest.mark.parametrize("name", ["lead", "lead-1", "lead_words", "random", "oracle"])
def test_built_in_baselines(pools: Any, tmp_path: Path, name: str) -> None:
    path = write_jsonl(tmp_path / "mine.jsonl", ROWS)
    out = evaluate(pools, "--predictions", path, "--baseline", name, "--output_dir", tmp_path)
    assert f"difference to {name}" in out
    metric = read(tmp_path / "comparison.json")["metrics"]["rouge1"]
    if name == "oracle":
        assert metric["losses"] == 1 and metric["wins"] == 0


def test_a_file_is_compared_with_itself(pools: Any, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ROWS)
    other = write_jsonl(tmp_path / "b.jsonl", ROWS[::-1])
    out = evaluate(pools, "--predictions", path, "--baseline", other)
    assert "no example differs" in out and "0 / 2 / 0" in out
    assert sorted(tmp_path.iterdir()) == [path, other]


def test_half_characters_end_nothing(pools: Any, steps: list[Path], tmp_path: Path) -> None:
    rows = [{"document": "Cut \ud83d.", "reference": "cut \ud83d", "prediction": "\ud83d soil"}]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    for baseline in (write_jsonl(tmp_path / "b.jsonl", rows), "lead", steps[1]):
        argv = ["--predictions", path, "--baseline", baseline, "--output_dir", tmp_path / "out"]
        assert f"difference to {baseline}" in evaluate(pools, *argv)
    [row] = (tmp_path / "out/predictions.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(row)["reference"] == rows[0]["reference"]


def test_presets_tokenizers_and_references_are_options(pools: Any, tmp_path: Path) -> None:
    rows = [{"references": ["完全相同", "不"], "prediction": "完全相同"}]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    argv = ["--predictions", path, "--output_dir", tmp_path]
    out = evaluate(pools, *argv)
    assert "note: 100 % of the letters" in out and "1 of 1 predictions have no word" in out
    out = evaluate(
        pools, *argv, "--evaluation.rouge_tokenizer", "unicode",
        "--evaluation.rouge_preset", "t5", "--evaluation.references", "average",
    )  # fmt: skip
    assert "no word" not in out
    found = read(tmp_path / "rouge.json")
    assert found["scores"]["rouge1"]["fmeasure"] == 0.5
    assert (found["settings"]["preset"], found["settings"]["stemmer"]) == ("t5", False)


def test_summaries_that_were_cut_are_told(pools: Any, steps: list[Path], tmp_path: Path) -> None:
    argv = ["--checkpoint", steps[1], "--output_dir", tmp_path, "--evaluation.max_new_tokens", 2]
    out = evaluate(pools, *argv)
    share = read(tmp_path / "rouge.json")["statistics"]["cut"]
    assert share > 0.5
    assert f"note: {100 * share:.0f} % of summaries were cut at evaluation.max_new_tokens" in out
    assert read(tmp_path / "rouge.json")["counts"]["references_with_lost_characters"] == 0


WRONG: dict[str, tuple[list[dict[str, Any]], tuple[str, ...]]] = {
    "ids": ([ROWS[0], dict(ROWS[1], id="c")], ("1 of the 2 ids", "'b'", "b.jsonl")),
    "number": (ROWS[:1], ("2 examples", "b.jsonl 1")),
    "references": ([ROWS[0], dict(ROWS[1], reference="x")], ("id 'b' has another reference",)),
    "a missing reference": ([{"prediction": "x"}], ("b.jsonl, line 1", "'reference'")),
    "ids twice": ([ROWS[0], ROWS[0]], ("b.jsonl, line 2", "line 1 too")),
}


@pytest.mark.parametrize("name", WRONG)
def test_other_examples_are_refused(pools: Any, tmp_path: Path, name: str) -> None:
    rows, words = WRONG[name]
    path = write_jsonl(tmp_path / "a.jsonl", ROWS)
    argv = ["--predictions", path, "--baseline", write_jsonl(tmp_path / "b.jsonl", rows)]
    code, out, err = pools(1).command("eval_rouge", argv)
    assert code == 2 and len(err.splitlines()) == 1 and err.startswith("error: "), err
    assert all(word in err for word in words), err
    assert "ROUGE-1" not in out


def test_other_examples_than_the_split_are_refused_before_generation(
    pools: Any, steps: list[Path], tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "rouge.json").write_text("{}")
    argv = ["--checkpoint", steps[1], "--baseline", write_jsonl(tmp_path / "b.jsonl", ROWS)]
    code, out, err = pools(2).command("eval_rouge", [*argv, "--output_dir", folder])
    assert code == 2 and len(err.splitlines()) == 1 and "11 examples and" in err
    assert "will be replaced" not in out
    assert [path.read_text() for path in folder.iterdir()] == ["{}"]


def test_a_baseline_that_is_not_there(pools: Any, tmp_path: Path) -> None:
    rows = [{name: row[name] for name in ("reference", "prediction")} for row in ROWS]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    for name, words in {
        "leed": ("leed", "lead_words", "oracle"),
        "gone.jsonl": ("cannot read predictions from gone.jsonl",),
        "lead": ("example 1", "no 'document'"),
        "./gone": ("no folder gone",),
    }.items():
        code, _, err = pools(1).command("eval_rouge", ["--predictions", path, "--baseline", name])
        assert code == 2 and len(err.splitlines()) == 1, err
        assert all(word in err for word in words), err
