"""Every contestant trains on the same tiny work, and what the benchmark says of it."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from t5_fsdp.benchmark.clock import Segment, joined
from t5_fsdp.benchmark.comparison import CONTESTANTS, train_function
from t5_fsdp.benchmark.ranks import RankFailed, Ranks
from t5_fsdp.benchmark.workload import Workload, random_examples

MODEL = {
    "vocab_size": 128, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4,
    "dropout_rate": 0.0,
}  # fmt: skip
CLOCK = {"warmup_steps": 1, "segment_steps": 2, "segments": 2}
NUM_STEPS = 1 + 2 * 3 + 1


def make_workload() -> Workload:
    examples = random_examples(
        64, 128, source_tokens=12, target_tokens=6, max_source_tokens=24, max_target_tokens=12,
        seed=3,
    )  # fmt: skip
    return Workload(
        model=MODEL,
        examples=examples,
        global_batch_size=8,
        micro_batch_tokens=100,
        max_source_tokens=24,
        max_target_tokens=12,
        param_dtype="fp32",
        log_every=1,
        learning_rate=1e-2,
    )


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2, environment={"CUDA_VISIBLE_DEVICES": ""}, threads=1, quiet=True) as started:
        yield started


def train(ranks: Ranks, name: str, workload: Workload) -> tuple[list[Segment], dict[int, float]]:
    """Segments of all ranks together, and rank 0's losses."""
    contestant = CONTESTANTS[name]
    if package := contestant.missing():
        pytest.skip(f"{package} is not installed")
    ranks.call(train_function(contestant.module), workload, CLOCK, *contestant.arguments)
    assert ranks.reports(120) == [None, None]  # the warm-up is done
    segments = []
    for _ in range(CLOCK["segments"]):
        ranks.go_on()
        segments.append(joined(ranks.reports(120)))
    ranks.go_on()
    return segments, ranks.results(120)[0]["losses"]


def test_ours_and_the_bare_loop_have_the_same_batches_and_losses(ranks: Ranks) -> None:
    workload = make_workload()
    reference, expected = train(ranks, "bare", workload)
    assert len(expected) == NUM_STEPS
    assert expected[NUM_STEPS] < expected[1]
    for name in ("fsdp2", "ddp"):
        segments, losses = train(ranks, name, workload)
        assert losses == pytest.approx(expected, rel=1e-5)
        for mine, theirs in zip(segments, reference, strict=True):
            untimed: Any = dict.fromkeys(
                ("seconds", "cpu_seconds", "peak_memory_bytes", "resident_bytes"), 0
            )
            assert dataclasses.replace(mine, **untimed) == dataclasses.replace(theirs, **untimed)
            assert mine.rows == 16 and mine.steps == 2


@pytest.mark.parametrize("name", ["tutorial", "lightning", "seq2seq_grouped"])
def test_others_train(ranks: Ranks, name: str) -> None:
    segments, losses = train(ranks, name, make_workload())
    for segment in segments:
        assert segment.steps == 2 and segment.rows == 16
        assert segment.real_tokens < segment.padded_tokens
        assert 0 < segment.tokens_per_second < math.inf
        assert segment.cpu_seconds > 0
        assert segment.flops > 0 and segment.peak_memory_bytes > 0
    assert len(losses) == NUM_STEPS
    assert all(math.isfinite(loss) for loss in losses.values())
    if name == "tutorial":
        assert segments[0].padded_tokens == 16 * 36


def test_bf16_is_computed_by_all_that_compare(ranks: Ranks) -> None:
    workload = dataclasses.replace(make_workload(), param_dtype="bf16")
    _, exact = train(ranks, "bare", make_workload())
    for name in ("bare", "fsdp2"):
        _, losses = train(ranks, name, workload)
        assert losses[1] == pytest.approx(exact[1], rel=2e-2)
        assert losses[1] != exact[1]


def fail(kind: str) -> None:
    import os

    if os.environ["RANK"] == "1":
        if kind == "death":
            os._exit(3)
        raise MemoryError if kind == "memory" else ValueError("seven\nlines")


def test_a_rank_that_fails_is_told_by_a_line() -> None:
    with Ranks(2, preload=()) as started:
        with pytest.raises(RankFailed) as caught:
            started.run(20, fail, "error")
        assert caught.value.reason == "ValueError: seven"
        assert "Traceback" in str(caught.value)
        with pytest.raises(RankFailed) as caught:
            started.run(20, fail, "memory")
        assert caught.value.out_of_memory
        with pytest.raises(RankFailed, match=r"rank 1 died \(exit code 3\)"):
            started.run(20, fail, "death")


def test_the_command_writes_table_json_and_markdown(tmp_path: Path, capsys: Any) -> None:
    from t5_fsdp.cli.benchmark import main

    code = main(
        ["--world_size", "1", "--device", "cpu", "--contestants", "fsdp2,bare", "--rounds", "2",
         "--steps", "2", "--warmup_steps", "1", "--model_config", json.dumps(MODEL),
         "--source_tokens", "12", "--target_tokens", "6", "--global_batch_size", "8",
         "--threads", "1", "--json", str(tmp_path / "b.json"),
         "--markdown", str(tmp_path / "b.md")]
    )  # fmt: skip
    shown = capsys.readouterr()
    assert code == 0, shown.err
    assert "this program, fsdp2" in shown.out
    assert max(map(len, shown.out.split("\n\n")[1].splitlines())) <= 80
    results = json.loads((tmp_path / "b.json").read_text(encoding="utf-8"))
    for name in ("fsdp2", "bare"):
        figures = results["contestants"][name]
        assert figures["tokens_per_second"] > 0
        assert 0 <= figures["padding_share"] < 1
        assert len(figures["segments"]) == 2
    assert results["contestants"]["bare"]["ratio_to_bare"] == 1.0
    assert "| bare PyTorch loop |" in (tmp_path / "b.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--rounds", "0"], "--rounds is 0"),
        (["--steps", "x"], "--steps"),
        (["--nonsense"], "--nonsense"),
        (["--global_batch_size", "7", "--device", "cpu"], "multiple of --world_size"),
        (["--texts", "a.jsonl"], "--tokenizer"),
        (["--model_config", "{"], "is no JSON"),
        (["--model_config", "[1]"], "is no mapping"),
        (["--model_config", '{"vocab_size": "x"}'], "vocab_size"),
        (["--reference", "lightning", "--contestants", "bare"], "--reference lightning"),
        (["--reference", "foo"], "--reference foo"),
        (["--suite", "gpu", "--device", "cpu"], "--tiny"),
        (["--mode", "generate", "--checkpoint", "x", "--texts", "y"], "is no folder"),
        (["--suite", "gpu", "--only", "("], "regular expression"),
        (["--suite", "gpu", "--only", "xyz"], "matches no row"),
        (["--mode", "data"], "--tokenizer"),
        (["--mode", "generate", "--checkpoint", "tests"], "--texts"),
        (["--json", "/nowhere/b.json"], "there is no folder"),
        (["--contestants", "bare,bare"], "there twice"),
        (["--device", "cuda", "--world_size", "64", "--global_batch_size", "64"], "GPUs"),
        (["--texts", "none.jsonl", "--tokenizer", "nowhere"], "nowhere"),
    ],
)
def test_a_wrong_option_is_one_line(options: list[str], said: str, capsys: Any) -> None:
    from t5_fsdp.cli.benchmark import main

    assert main(options) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("error: ") and said in lines[0]


def test_needed_packages_are_named() -> None:
    for contestant in CONTESTANTS.values():
        missing = [name for name in contestant.needs if importlib.util.find_spec(name) is None]
        assert contestant.missing() == (missing[0] if missing else None)
