"""Every contestant trains on the same tiny work, and what the benchmark says of it."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from t5_fsdp.benchmark.clock import Segment, joined
from t5_fsdp.benchmark.comparison import CONTESTANTS, train_function
from t5_fsdp.benchmark.ranks import RankFailed, Ranks, Turns, report
from t5_fsdp.benchmark.workload import Examples, Workload, random_examples

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


def drawn(engine: str, workload: Workload) -> dict[str, Any]:
    """On a rank: the whole model as it begins on GPUs, where each rank draws."""
    import torch

    from t5_fsdp.benchmark import ours
    from t5_fsdp.benchmark.world import entered_world
    from t5_fsdp.config import ParallelConfig
    from t5_fsdp.model.build import build_on_meta
    from t5_fsdp.parallel.common import local_part, stored_tensors
    from t5_fsdp.parallel.engine import parallelize

    with entered_world("cpu") as world:
        options: Any = ParallelConfig(engine=engine, param_dtype="fp32")  # type: ignore[arg-type]
        made = parallelize(build_on_meta(workload.spec()), options, world)
        made.materialize()
        ours.fill(made, workload.seed, torch.device("cpu"))
        held = {n: local_part(t).numel() for n, t in stored_tensors(made.model).items()}
        full = made.gather_full(torch.float32)
        return {"held": held, "weights": {name: t.numpy() for name, t in full.items()}}


def test_weights_drawn_on_gpus_are_the_same_on_all_ranks_and_for_all(ranks: Ranks) -> None:
    import torch

    from t5_fsdp.benchmark.workload import random_weight

    workload = make_workload()
    (ddp, other), (fsdp2, _) = (ranks.run(120, drawn, e, workload) for e in ("ddp", "fsdp2"))
    assert 0 < sum(fsdp2["held"].values()) < 0.6 * sum(ddp["held"].values())
    assert ddp["weights"].keys() == workload.weights(torch.device("cpu")).keys()
    for name, weight in ddp["weights"].items():
        expected = random_weight(name, torch.Size(weight.shape), workload.seed, "cpu").numpy()
        for others in (other, fsdp2):
            np.testing.assert_array_equal(weight, others["weights"][name])
        np.testing.assert_array_equal(weight, expected)
    for first, second in (("q", "k"), ("q", "o")):
        names = [f"encoder.block.0.layer.0.SelfAttention.{n}.weight" for n in (first, second)]
        assert not np.array_equal(*(ddp["weights"][name] for name in names))


@pytest.mark.parametrize("name", ["lightning", "seq2seq"])
def test_counts_go_on_through_the_epochs(name: str) -> None:
    # An epoch is two steps of half the examples; of two steps that belong to different epochs
    # the same examples would be counted as of one if the counts began anew.
    lengths = 2 ** np.arange(8)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    part = np.full(offsets[-1], 5, np.int32), offsets
    workload = dataclasses.replace(
        make_workload(), examples=Examples(part, part), global_batch_size=4
    )
    clock = {"warmup_steps": 0, "segment_steps": 2, "segments": 6}
    contestant = CONTESTANTS[name]
    if package := contestant.missing():
        pytest.skip(f"{package} is not installed")
    with Ranks(1, environment={"CUDA_VISIBLE_DEVICES": ""}, threads=1, quiet=True) as one:
        turns = Turns(one, 120, train_function(contestant.module), workload, clock,
                      *contestant.arguments)  # fmt: skip
        segments = [turns.take()[0] for _ in range(clock["segments"])]
        turns.end()
    # Steps 2 and 3, then 5 and 6, and so on: every other segment has both steps of an epoch.
    whole = [segment.source_tokens for segment in segments[1::2]]
    assert whole == [255] * 3
    assert any(segment.source_tokens != 255 for segment in segments[::2])


def slow(seconds: float) -> None:
    for _ in range(2):
        time.sleep(seconds)
        report(None)
    time.sleep(seconds)


def test_turns_have_one_deadline() -> None:
    with Ranks(1, preload=()) as one:
        one.run(60, slow_start)
        began = time.monotonic()
        turns = Turns(one, 60, slow, 0.7, deadline=began + 1.0)
        with pytest.raises(RankFailed, match="did not answer"):
            turns.take()
            turns.end()
        assert time.monotonic() - began >= 1.0
        assert one.is_closed


def slow_start() -> None:
    """Nothing, once the process is there."""


def fail(kind: str) -> None:
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


def test_a_rank_that_ended_between_two_calls_is_told_and_the_ranks_are_closed() -> None:
    with Ranks(2, preload=()) as started:
        [_, process] = started.run(20, os.getpid)
        os.kill(process, signal.SIGKILL)
        with pytest.raises(RankFailed, match=r"rank 1 died \(signal 9\)"):
            for _ in range(2):  # the first may still have been taken
                started.run(20, os.getpid)
        assert started.is_closed


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
        (["--world_size", "-1"], "--world_size is -1"),
        (["--world_size", "1024", "--global_batch_size", "1024", "--device", "cpu"], "at most"),
        (["--threads", "4096", "--device", "cpu"], "--threads is 4096"),
        (["--global_batch_size", "100000000"], "--global_batch_size is 100000000"),
        (["--seed", "-1"], "--seed is -1"),
        (["--mode", "trian"], "'trian'"),
        (["--suite", "gpus"], "'gpus'"),
        (["--model_config", '{"model_type": "bart"}'], "model_type"),
        (["--model_config", '{"d_model": -4}'], "--model_config: d_model is -4"),
        (["--model_config", '{"dmodel": 4}'], "--model_config: dmodel"),
        (["--micro_batch_tokens", "100", "--device", "cpu"], "--micro_batch_tokens is 100"),
        (["--mode", "data", "--tokenizer", "no/such/folder"], "no/such/folder"),
        (["--mode", "generate", "--texts", "y", "--checkpoint", "tests"], "no tokenizer files"),
        (["--json", "/dev/null/b.json", "--device", "cpu"], "can't be written"),
        (["--markdown", "tests", "--device", "cpu"], "--markdown tests is a folder"),
        (["--json", "b", "--markdown", "b", "--device", "cpu"], "give two files"),
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
        (["--suite", "gpu", "--mode", "train"], "takes the place of --mode"),
        (["--mode", "data"], "--tokenizer"),
        (["--mode", "generate", "--checkpoint", "tests"], "--texts"),
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


@pytest.mark.parametrize(
    ("options", "text", "said"),
    [
        ([], "", "is empty"),
        ([], '{"document": "a", "summary": " "}', "line 1"),
        ([], "[1]", "line 1"),
        ([], "\udcff", "line 1"),
        (["--mode", "generate"], '{"document": "a"}', "line 1"),
        (["--model_config", '{"vocab_size": 100}'], '{"document": "a", "summary": "b"}', "is 100"),
        (["--mode", "generate", "--model_config", '{"vocab_size": 100}'],
         '{"document": "a", "summary": "b"}', "--model_config '{"),
    ],
)  # fmt: skip
def test_wrong_texts_and_tokenizers_are_one_line(
    options: list[str], text: str, said: str, tmp_path: Path, corpus: Path, capsys: Any
) -> None:
    from t5_fsdp.cli.benchmark import main

    texts = tmp_path / "texts.jsonl"
    texts.write_bytes(text.encode("utf-8", "surrogateescape"))
    tokenizer = str(corpus / "tokenizer")
    assert main([*options, "--device", "cpu", "--texts", str(texts), "--tokenizer", tokenizer]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and said in line and ("texts" in line or tokenizer in line)


@pytest.mark.parametrize(
    ("options", "package"),
    [
        (["--mode", "generate", "--texts", "x", "--checkpoint", "tests"], "accelerate"),
        (["--mode", "generate", "--texts", "x", "--checkpoint", "tests"], "rouge_score"),
        (["--mode", "data", "--tokenizer", "x"], "datasets"),
        (["--mode", "startup"], "jsonargparse"),
        (["--contestants", "bare,lightning"], "lightning"),
        (["--contestants", "seq2seq"], "accelerate"),
    ],
)
def test_a_missing_package_is_one_line(
    options: list[str], package: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    from t5_fsdp.cli.benchmark import main

    monkeypatch.setitem(sys.modules, package, None)
    assert main([*options, "--device", "cpu"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and f"the package {package}," in line and "install" in line


def test_needed_packages_are_named() -> None:
    for contestant in CONTESTANTS.values():
        missing = [name for name in contestant.needs if importlib.util.find_spec(name) is None]
        assert contestant.missing() == (missing[0] if missing else None)
