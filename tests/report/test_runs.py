"""Reading a run's folder."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from t5_fsdp.errors import UserError
from t5_fsdp.report.runs import curve, read_run, read_runs


def add_lines(folder: Path, *lines: str) -> None:
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.writelines(lines)


def train_line(step: int, loss: str) -> str:
    return f'{{"kind": "train", "step": {step}, "loss": {loss}}}\n'


def test_of_a_step_logged_twice_the_last_row_counts(make_run) -> None:
    folder = make_run(rows=[])
    add_lines(folder, *(train_line(step, "1.0") for step in (10, 20, 30)), train_line(20, "2.0"))
    assert curve(read_run(folder).train, "loss") == [(10, 1.0), (20, 2.0), (30, 1.0)]


def test_a_torn_last_line_is_left_out(make_run) -> None:
    folder = make_run(rows=[])
    add_lines(folder, train_line(10, "1.0"), '{"kind": "train", "step": 20, "lo')
    assert [row["step"] for row in read_run(folder).train] == [10]


def test_what_is_not_finite_is_a_gap(make_run) -> None:
    folder = make_run(rows=[])
    values = ["1.0", "null", "NaN", "1e999", "-Infinity", '"a"', "true", "2"]
    add_lines(folder, *(train_line(step, value) for step, value in enumerate(values)))
    found = [value for _, value in curve(read_run(folder).train, "loss")]
    assert found == [1.0, None, None, None, None, None, None, 2]
    assert curve(read_run(folder).train, "mfu") == []


@pytest.mark.parametrize(
    "line", ["not JSON", "[1]", '{"kind": "train"}', '{"kind": "train", "step": "3"}', "\xff"]
)
def test_a_spoilt_line_is_named(make_run, line: str) -> None:
    folder = make_run(rows=[])
    content = (train_line(1, "1.0") + line + "\n").encode("latin-1") + train_line(3, "1").encode()
    (folder / "metrics.jsonl").write_bytes(content)
    with pytest.raises(UserError, match=r"metrics\.jsonl, line 2 is no row"):
        read_run(folder)


@pytest.mark.parametrize("name", ["status.json", "data_audit.json", "environment.json"])
@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_spoilt_file_is_named(make_run, name: str, text: str) -> None:
    folder = make_run()
    (folder / name).write_text(text)
    with pytest.raises(UserError, match=name):
        read_run(folder)


@pytest.mark.parametrize("text", ["a: [", "- a"])
def test_a_spoilt_configuration_is_named(make_run, text: str) -> None:
    folder = make_run()
    (folder / "config.yaml").write_text(text)
    with pytest.raises(UserError, match=r"config\.yaml"):
        read_run(folder)


def test_folders_without_a_run_are_refused(make_run, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    folder = make_run()
    checkpoint = folder / "checkpoints" / "step-00000010"
    checkpoint.mkdir(parents=True)
    (checkpoint / "COMPLETE").write_text("{}")
    for path, words in {
        tmp_path / "missing": "does not exist",
        tmp_path / "file": "is no folder",
        tmp_path / "empty": "holds no run",
        checkpoint: f"is a checkpoint; give the folder of its run, {folder}",
    }.items():
        with pytest.raises(UserError, match=words):
            read_run(path)


def test_a_run_with_one_file_is_enough(tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text('{"state": "failed", "step": 0}')
    run = read_run(tmp_path)
    assert (run.train, run.evaluations, run.checkpoints, run.config) == ([], [], [], {})


def test_best_validation_is_by_the_runs_metric(make_run) -> None:
    rows = [
        {"kind": "validation", "step": step, "loss": loss, "rougeLsum": rouge}
        for step, loss, rouge in [(1, 3.0, 0.2), (2, math.nan, 0.4), (3, 2.0, 0.3), (4, 2.5, None)]
    ]
    by_rouge = read_run(make_run("a", rows)).best_validation
    by_loss = read_run(make_run("b", rows, **{"evaluation.best_metric": "loss"})).best_validation
    assert by_rouge is not None and by_rouge["step"] == 2
    assert by_loss is not None and by_loss["step"] == 3
    assert read_run(make_run("c", rows[3:])).best_validation is None


def test_names_are_as_short_as_they_can_be(make_run) -> None:
    folders = [make_run(name) for name in ("a/run", "b/run", "other")]
    assert [run.name for run in read_runs([*folders, folders[0]])] == ["a/run", "b/run", "other"]


def test_a_prediction_is_found_with_its_scores(make_run) -> None:
    (evaluated,) = read_run(make_run()).evaluations
    assert (evaluated.split, evaluated.step, evaluated.where) == ("test", 500, "test, step 500")
    assert evaluated.fmeasure("rouge1") == 0.3
    assert evaluated.fmeasure("rouge1", "_low") == 0.28
    assert evaluated.fmeasure("rouge9") is None


def test_an_evaluation_that_is_being_written_is_left_out(make_run) -> None:
    folder = make_run()
    (folder / "evaluation/step-00000500/test/rouge.json").unlink()
    assert read_run(folder).evaluations == []


def test_reading_needs_no_torch(make_run) -> None:
    folder = make_run()
    code = (
        "import sys\nfrom t5_fsdp.cli.report import main\n"
        f"assert main(['--run', {json.dumps(str(folder))}]) == 0\n"
        "assert not {'torch', 'transformers', 'datasets', 'numpy'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
