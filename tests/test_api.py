"""The library: its functions in this process, on ranks of a pool, and twice in one torchrun."""

from __future__ import annotations

import contextlib
import copy
import faulthandler
import json
import logging
import os
import pickle
import random
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
import yaml

import t5_fsdp
from t5_fsdp import (
    Config,
    PeerFailed,
    Preempted,
    UserError,
    api,
    evaluate,
    load_config,
    plan,
    summarize,
    train,
)
from t5_fsdp.cli.options import dump_yaml
from t5_fsdp.config import TrainConfig
from tests.conftest import MODEL, ROOT, make_pairs, read_metrics, tiny_options


def tiny_config(corpus: Path, run_dir: Path, **options: Any) -> Config:
    """As `tiny_options`, for the library."""
    argv = tiny_options(corpus, run_dir)[2:]
    texts = dict(zip(argv[::2], argv[1::2], strict=True))
    values = {name[2:]: _value(text) for name, text in texts.items()}
    return load_config(None, **{"run_dir": run_dir, **values, **options})


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return float(text) if text[:1].isdigit() else text


def pairs(count: int, seed: int) -> list[tuple[str, str]]:
    return [(row["document"], row["summary"]) for row in make_pairs(count, seed)]


GIVEN = {"train": pairs(60, 0), "validation": pairs(13, 1), "test": pairs(11, 2)}


FILES = {"source": "files", "train_files": ["a.jsonl"]}


class Rows:
    """A dataset as torch has it, whose end no IndexError tells."""

    def __init__(self, rows: list[tuple[str, str]]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, str]:
        document, summary = self.rows[index % len(self.rows)]
        return {"text": document, "abstract": summary}


def coverage(predictions: list[str], references: list[str]) -> dict[str, float]:
    """Share of the reference's words that are predicted."""
    shares = [
        len(set(prediction.split()) & set(reference.split())) / len(set(reference.split()))
        for prediction, reference in zip(predictions, references, strict=True)
    ]
    return {"coverage": sum(shares) / len(shares)}


def losses(run_dir: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(run_dir, "train")]


def test_importing_the_package_is_cheap() -> None:
    program = (
        "import sys, t5_fsdp; from t5_fsdp import UserError, load_config\n"
        "load_config('configs/demo.yaml')\n"
        "assert not {'torch', 'transformers', 'datasets'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert set(t5_fsdp.__all__) <= set(dir(t5_fsdp))
    with pytest.raises(AttributeError, match="no attribute 'fit'"):
        t5_fsdp.fit  # noqa: B018


def test_options_are_checked_as_a_commands(tmp_path: Path) -> None:
    config = load_config(
        ROOT / "configs/demo.yaml",
        run_dir=tmp_path,
        train={"epochs": 1},
        **{"train.max_steps": 3, "data.train_files": (tmp_path / "a.jsonl",)},
    )
    assert config.run_dir == str(tmp_path) and config.optimizer.lr == 3e-3
    assert (config.train.epochs, config.train.max_steps) == (1.0, 3)
    assert config.data.train_files == [str(tmp_path / "a.jsonl")]
    entries = {"model.config.d_model": 32, "model.config.num_layers": 1}
    changed = load_config(ROOT / "configs/demo.yaml", **entries).model.config
    before = load_config(ROOT / "configs/demo.yaml").model.config
    assert changed == {**before, "d_model": 32, "num_layers": 1} and len(before) > 2
    wrong = {"train.epoch": 1, "optimizer": {"lr": "fast"}, "evaluation.num_beams": 0}
    with pytest.raises(UserError) as caught:
        load_config(**wrong)
    assert len(caught.value.problems) == 3 and "train.epochs" in str(caught.value)
    with pytest.raises(UserError, match="no such file"):
        load_config("configs/demmo.yaml")


def test_numbers_of_numpy_and_paths_are_options(tmp_path: Path) -> None:
    model = {"config": {"d_model": np.int64(64)}}
    config = load_config(
        run_dir=tmp_path,
        model=model,
        train=TrainConfig(epochs=2),
        **{"train.max_steps": np.int32(7), "optimizer.lr": torch.tensor(0.5)},
    )
    assert (config.train.epochs, config.train.max_steps, config.optimizer.lr) == (2, 7, 0.5)
    assert type(config.model.config["d_model"]) is int
    config.run_dir = tmp_path / "other"  # type: ignore[assignment]
    config.seed, config.optimizer.lr = np.int64(3), np.float32(0.25)  # type: ignore[assignment]
    config.data.prefix = np.str_("tldr: ")
    checked = api._check(config, {"train": []}, None)
    assert (checked.run_dir, checked.seed) == (str(tmp_path / "other"), 3)
    assert yaml.safe_load(dump_yaml(checked))["data"]["prefix"] == "tldr: "
    assert yaml.safe_load(dump_yaml(checked))["optimizer"]["lr"] == 0.25


def test_a_misspelt_attribute_is_refused() -> None:
    config = load_config()
    with pytest.raises(UserError, match=r"^unknown option optimizer.learn; optimizer has name, lr"):
        config.optimizer.learn = 1
    with pytest.raises(UserError, match=r"train.epoch; did you mean train.epochs\?$"):
        config.train.epoch = 1
    with pytest.raises(UserError, match=r"option run_dirs; did you mean run_dir\?$"):
        config.run_dirs = "runs"
    assert copy.deepcopy(config) == pickle.loads(pickle.dumps(config)) == config


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda config: train("demo.yaml"), "config is a str: 'demo.yaml'; give what load_config"),
        (lambda config: train({"train": {}}), "config is a dict: "),
        (lambda config: train(config, metric="rouge"), "metric is a str: 'rouge'; give a function"),
        (lambda config: train(config, data=5), "data, train is an int: 5; give a list of pairs"),
        (lambda config: train(config, data=pandas.DataFrame()), r"give its rows: .to_dict\("),
        (lambda config: evaluate(None), "checkpoint is a NoneType: None; give a path"),
        (lambda config: evaluate("runs", config={}), "config is a dict: {}"),
        (lambda config: evaluate("runs", split="dev"), "split is 'dev'; give train"),
        (lambda config: evaluate("runs", output_dir=1), "output_dir is an int: 1; give a path"),
        (lambda config: summarize(None, "runs"), "texts is a NoneType: None; give a list"),
        (lambda config: summarize("a text", "runs"), "texts is one string"),
        (lambda config: summarize(["a", 1.5], "runs"), "text 1 is a float: 1.5; give a string"),
        (lambda config: summarize(["a"], ["runs"]), r"checkpoint is a list: \['runs'\]"),
        (lambda config: plan("demo.yaml"), "config is a str"),
        (lambda config: load_config(["--help"]), "^--help: no such file"),
        (lambda config: summarize(["a"], "runs/t5"), "^checkpoint runs/t5 is .* give config too"),
        (lambda config: evaluate("a/b/c"), "^checkpoint: there is no folder a/b/c"),
        (lambda config: load_config(5), "path is an int: 5; give a path"),
        (lambda config: load_config({"train": {}}), r"by name: load_config\(\*\*options\)"),
        (lambda config: load_config(**{"evaluation.best_metric": ""}), "best_metric is empty"),
        (lambda config: load_config(data={**FILES, "summary_column": "document"}), "are both"),
        (lambda config: load_config(data={**FILES, "document_column": "id"}), "column with texts"),
    ],
)
def test_wrong_arguments_are_told_in_one_line(call: Any, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        call(load_config())
    assert len(caught.value.problems) == 1


def test_examples_in_memory_train_as_the_same_in_files(corpus: Path, tmp_path: Path) -> None:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    filters, level = list(warnings.filters), logging.getLogger("transformers").level
    by_files = train(tiny_config(corpus, tmp_path / "files"), quiet=True)
    config = tiny_config(corpus, tmp_path / "pairs")
    before = load_config(**{"run_dir": config.run_dir, **_sections(config)})
    given = train(config, data=GIVEN, quiet=True)
    assert config == before  # it is the caller's
    assert losses(given.run_dir) == losses(by_files.run_dir)
    assert given.scores == by_files.scores and given.scores["loss"] > 0
    assert given.checkpoint == tmp_path / "pairs/checkpoints/step-00000010"
    assert (given.step, given.message.split(" (")[0]) == (10, "trained 10 steps")

    columns = {"data.document_column": "text", "data.summary_column": "abstract"}
    config = tiny_config(corpus, tmp_path / "rows", **columns, **{"train.max_steps": 5})
    rows = {split: Rows(examples) for split, examples in GIVEN.items()}
    assert train(config, data=rows, quiet=True).step == 5
    config.train.max_steps = 10
    assert train(config, data=rows, quiet=True).step == 10  # it goes on
    assert losses(tmp_path / "rows") == losses(by_files.run_dir)
    found = evaluate(tmp_path / "rows", data=rows["test"], quiet=True)  # columns as in training
    assert found.predictions()[0]["reference"] == GIVEN["test"][0][1]
    rows["train"] = Rows(pairs(61, 5))
    config.train.max_steps = 11
    with pytest.raises(UserError, match="trained on other training data"):
        train(config, data=rows, quiet=True)
    assert handlers == {number: signal.getsignal(number) for number in handlers}
    assert filters == warnings.filters
    assert level == logging.getLogger("transformers").level

    found = evaluate(given.run_dir, quiet=True)
    with pytest.raises(UserError, match="gives a float"):  # before any summary is made
        evaluate(given.run_dir, metric=lambda *_: 0.5, output_dir=tmp_path / "none", quiet=True)  # type: ignore[arg-type,return-value]
    assert not (tmp_path / "none").exists()
    again = evaluate(given.run_dir, data=GIVEN["test"], quiet=True, metric=coverage)
    assert found.folder == given.run_dir / "evaluation/step-00000010/test"
    assert again.folder.name == "given"
    assert found.scores == {name: again.scores[name] for name in found.scores}
    predictions = [row["prediction"] for row in found.predictions()]
    assert predictions == [row["prediction"] for row in again.predictions()]
    expected = coverage(predictions, [summary for _, summary in GIVEN["test"]])
    assert again.scores["coverage"] == pytest.approx(expected["coverage"])
    documents = [document for document, _ in GIVEN["test"]]
    assert summarize(documents, given.run_dir) == predictions
    greedy = summarize(documents, given.checkpoint, evaluation={"max_new_tokens": 1})
    assert max(map(len, greedy)) < max(map(len, predictions))


def _sections(config: Config) -> dict[str, Any]:
    import dataclasses

    values = dataclasses.asdict(config)
    del values["run_dir"]
    return values


def test_an_own_metric_chooses_the_best(corpus: Path, tmp_path: Path) -> None:
    options = {
        "evaluation.every_steps": 4,
        "evaluation.best_metric": "fewest",
        "checkpoint.keep_last": 1,
    }
    calls: list[int] = []

    def fewest(predictions: list[str], references: list[str]) -> dict[str, Any]:
        calls.append(len(predictions))
        assert len(predictions) == len(references)
        # The earlier, the better: not what ROUGE says.
        return {"fewest": -len(calls), "odd": float("nan")}

    config = tiny_config(corpus, tmp_path / "run", **options)
    result = train(config, metric=fewest, quiet=True)
    assert calls == [8, 13, 13, 13]  # tried, then steps 4, 8 and 10
    assert result.checkpoint.name == "step-00000004" and result.scores["fewest"] == -2
    rows = read_metrics(tmp_path / "run", "validation")
    assert [row["fewest"] for row in rows] == [-2, -3, -4] and rows[0]["odd"] is None
    written = json.loads(
        (tmp_path / "run/evaluation/step-00000004/validation/rouge.json").read_text()
    )
    assert written["metrics"] == {"fewest": -2.0, "odd": None}
    # The commands take the checkpoint as it is.
    assert evaluate(tmp_path / "run", quiet=True).source == str(result.checkpoint)
    with pytest.raises(UserError, match="best_metric is 'fewest'; give one of rouge1"):
        train(config, quiet=True)


def train_with_a_late_mistake(corpus: Path, run_dir: Path) -> None:
    """On a rank of a pool, or alone."""

    def late(predictions: list[str], references: list[str]) -> dict[str, float]:
        return {"share": 1 / (len(references) - 13)}  # as many are no trial

    options = {"evaluation.every_steps": 2, "evaluation.best_metric": "share", "train.max_steps": 3}
    with pytest.raises((ZeroDivisionError, PeerFailed)):
        train(tiny_config(corpus, run_dir, **options), metric=late, quiet=True)


def test_a_metric_that_fails_late_costs_no_step(pools: Any, corpus: Path, tmp_path: Path) -> None:
    pools(2).run(train_with_a_late_mistake, corpus, tmp_path / "two")
    train_with_a_late_mistake(corpus, tmp_path / "one")
    for run in (tmp_path / "one", tmp_path / "two"):
        assert json.loads((run / "status.json").read_text())["state"] == "failed"
        config = tiny_config(corpus, run, **{"evaluation.every_steps": 2, "train.max_steps": 3})
        assert train(config, metric=coverage, quiet=True).step == 3
        assert [row["step"] for row in read_metrics(run, "validation")] == [2, 3]
        assert "resuming from" in (run / "log.txt").read_text()


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        (lambda predictions, references: 0.5, "gives a float"),
        (lambda predictions, references: {"rouge1": 1.0}, "the name 'rouge1'"),
        (lambda predictions, references: {"a": "high"}, "a = 'high'; give a number"),
        (lambda predictions, references: {"other": 1.0}, "best_metric is 'coverage'; .*other"),
    ],
)
def test_a_bad_metric_is_met_before_training(
    corpus: Path, tmp_path: Path, metric: Any, message: str
) -> None:
    config = tiny_config(corpus, tmp_path / "run", **{"evaluation.best_metric": "coverage"})
    with pytest.raises(UserError, match=message):
        train(config, metric=metric, quiet=True)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"dev": []}, "the split 'dev'"),
        ({"validation": GIVEN["validation"]}, "no training split"),
        ([("a document", "a summary"), "half"], "train, example 1 is a str: 'half'"),
        ("text", "train is a str: 'text'"),
        ([("a", object())], "can't be written as JSON"),
        ([{"document": "a", "text": "b"}], "no column 'summary'"),
        ([("a document", [["nested"]])], "column 'summary' holds"),
        (iter(()), "data, train has no example; .* gives its only once"),
        ([("a document", float("nan"))], "no usable rows .* 1 empty summary"),
    ],
)
def test_bad_examples_are_refused(corpus: Path, tmp_path: Path, data: Any, message: str) -> None:
    options = {"data.cache_dir": tmp_path / "cache"}
    with pytest.raises(UserError, match=message):
        train(tiny_config(corpus, tmp_path / "run", **options), data=data, quiet=True)
    assert not (tmp_path / "run").exists()
    assert not list((tmp_path / "cache").glob("given/.*"))


def test_a_failure_leaves_no_process_group(corpus: Path, tmp_path: Path, monkeypatch: Any) -> None:
    import torch.distributed as dist

    from t5_fsdp.training.trainer import Trainer

    def fail(self: Any) -> str:
        raise RuntimeError("a defect")

    config = tiny_config(corpus, tmp_path / "run", **{"train.max_steps": 1})
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "run", fail)
        with pytest.raises(RuntimeError, match="a defect"):
            train(config, quiet=True)
    assert not dist.is_initialized()
    status = json.loads((tmp_path / "run/status.json").read_text())
    assert status["state"] == "failed" and "a defect" in status["message"]
    assert "a defect" in (tmp_path / "run/log.txt").read_text()
    assert train(config, quiet=True).step == 1
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(UserError, match=r"has a torch\.distributed process group already"):
            train(config, quiet=True)
        assert plan(config)["fits"]  # needs none
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def odd_torch() -> Iterator[None]:
    """What a program may have set, each of which would change or break a training."""
    torch.set_default_dtype(torch.float64)
    try:
        with (
            torch.device("meta"),
            torch.autocast("cpu", dtype=torch.bfloat16),
            torch.inference_mode(),
        ):
            yield
    finally:
        torch.set_default_dtype(torch.float32)


def state_of_process() -> tuple[Any, ...]:
    return (
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_rng_state().tolist(),
        np.random.get_state()[1].tolist(),  # type: ignore[index,union-attr]
        random.getstate(),
        sys.excepthook,
        dict(os.environ),
        {number: signal.getsignal(number) for number in signal.valid_signals()},
    )


def test_the_programs_state_is_neither_heeded_nor_changed(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = train(tiny_config(corpus, tmp_path / "usual", **{"train.max_steps": 2}), quiet=True)
    monkeypatch.delattr(sys, "argv")  # as where Python is embedded
    faulthandler.register(signal.SIGUSR1)  # in C: Python can't put it back
    try:
        with odd_torch():
            before = state_of_process()
            config = tiny_config(corpus, tmp_path / "odd", **{"train.max_steps": 2})
            odd = train(config, quiet=True)
            assert state_of_process() == before
    finally:
        faulthandler.unregister(signal.SIGUSR1)
    assert losses(odd.run_dir) == losses(usual.run_dir) and odd.scores == usual.scores


def test_one_call_at_a_time_from_any_thread(corpus: Path, tmp_path: Path) -> None:
    refused: list[str] = []

    def nested(predictions: list[str], references: list[str]) -> dict[str, float]:
        with pytest.raises(UserError) as caught:
            summarize(["a text"], tmp_path / "run", quiet=True)
        refused.append(str(caught.value))
        return {"even": 1.0}

    config = tiny_config(corpus, tmp_path / "run", **{"train.max_steps": 1})
    with ThreadPoolExecutor(1) as thread:
        result = thread.submit(train, config, metric=nested, quiet=True).result()
    assert result.scores["even"] == 1 and "another call of t5_fsdp is at work" in refused[0]
    assert summarize([""], result.checkpoint) == [""]  # the lock is free


def test_ctrl_c_saves_and_a_second_one_is_pythons(corpus: Path, tmp_path: Path) -> None:
    def interrupt(times: int) -> Any:
        def metric(predictions: list[str], references: list[str]) -> dict[str, float]:
            if len(references) == 13:  # no trial: a validation
                for _ in range(times):
                    signal.raise_signal(signal.SIGINT)
            return {}

        return metric

    options = {"evaluation.every_steps": 2, "train.max_steps": 5}
    config = tiny_config(corpus, tmp_path / "run", **options)
    with pytest.raises(KeyboardInterrupt):
        train(config, metric=interrupt(2), quiet=True)
    status = json.loads((tmp_path / "run/status.json").read_text())
    assert (status["state"], status["message"]) == ("failed", "KeyboardInterrupt")
    with pytest.raises(Preempted, match="after step 3"):
        train(config, metric=interrupt(1), quiet=True)
    assert train(config, metric=coverage, quiet=True).step == 5
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_plan_gives_the_commands_numbers(corpus: Path, tmp_path: Path) -> None:
    from t5_fsdp.cli.plan import main as plan_command

    argv = tiny_options(corpus, tmp_path / "run")
    config = tiny_config(corpus, tmp_path / "run")
    found = plan(config, world_size=2, device="h100")
    options = {"--world_size": 2, "--device": "h100", "--simulate": "false",
               "--json": tmp_path / "plan.json"}  # fmt: skip
    words = [str(word) for pair in options.items() for word in pair]
    assert plan_command([*argv, *words]) == 0
    assert found == json.loads((tmp_path / "plan.json").read_text())
    assert found["method"] == "closed form" and found["fits"]
    with pytest.raises(UserError) as caught:
        plan(config, device="tpu", world_size="many", sweep=None)  # type: ignore[arg-type]
    named = [problem.partition(" ")[0] for problem in caught.value.problems]
    assert named == ["world_size", "device", "sweep"]


def train_on_ranks(corpus: Path, run_dir: Path) -> tuple[Any, Any, list[str]]:
    """On a rank of a pool."""
    result = train(tiny_config(corpus, run_dir), data=GIVEN, metric=coverage, quiet=True)
    run_dir.with_name("file").touch()
    for name, tokens in (("bad", 10), ("file", 600)):  # met by all ranks, then by rank 0 alone
        bad = tiny_config(corpus, run_dir.with_name(name), **{"train.micro_batch_tokens": tokens})
        with pytest.raises(UserError, match=r"micro_batch_tokens|is no folder"):
            train(bad, data=GIVEN, quiet=True)
    scores = evaluate(run_dir, data=GIVEN["test"], quiet=True).scores
    return result, scores, summarize(["rice water door."], run_dir)


def test_ranks_get_the_same_results(pools: Any, corpus: Path, tmp_path: Path) -> None:
    one, two = pools(2).run(train_on_ranks, corpus, tmp_path / "run")
    assert one == two
    alone = train(tiny_config(corpus, tmp_path / "alone"), quiet=True)
    assert losses(one[0].run_dir) == pytest.approx(losses(alone.run_dir), rel=1e-5)
    assert one[0].scores["loss"] == pytest.approx(alone.scores["loss"], rel=1e-4)


WITHOUT_A_GUARD = """
print("once", flush=True)
from t5_fsdp import load_config, plan
model = {"name": None, "init": "random", "tokenizer": "train",
         "config": {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4}}
config = load_config(model=model, data={"source": "sample"})
print(plan(config, simulate=True)["method"])
"""


@pytest.mark.long
def test_a_plan_runs_the_program_once(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(WITHOUT_A_GUARD)
    done = subprocess.run(
        [sys.executable, tmp_path / "program.py"],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert (done.stdout, done.stderr) == ("once\nsimulation\n", "")


PROGRAM = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv.pop(1))
from t5_fsdp import UserError, evaluate, load_config, train
from tests.test_api import GIVEN, tiny_config
corpus, run_dir = map(Path, sys.argv[1:])
for name in ("first", "second"):
    result = train(tiny_config(corpus, run_dir / name, **{"train.max_steps": 2}), data=GIVEN)
(run_dir / "file").touch()
for name, options in (("third", {"train.micro_batch_tokens": 10}), ("file", {})):
    try:  # met on every rank, then on rank 0 alone
        train(tiny_config(corpus, run_dir / name, **options), quiet=True)
    except UserError as error:
        print("refused:", error)
print(evaluate(result.run_dir, quiet=True).scores["rouge1"] >= 0)
"""


@pytest.mark.long
def test_twice_in_one_torchrun(corpus: Path, tmp_path: Path) -> None:
    from tests.launch import run as launch

    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node",
               "2", tmp_path / "program.py", ROOT, corpus, tmp_path]  # fmt: skip
    found = launch([str(word) for word in command])
    assert found.returncode == 0, found.stderr
    assert found.stdout.count("done: trained 2 steps") == 2 and found.stdout.count("True") == 2
    assert found.stdout.count("refused: row") == found.stdout.count("is no folder; move") == 2
    assert losses(tmp_path / "first") == losses(tmp_path / "second")


def register_half_t5() -> None:
    """A T5 whose feed-forward layers add half as much."""
    from transformers import AutoConfig, AutoModelForSeq2SeqLM, T5Config, T5ForConditionalGeneration

    class HalfT5Config(T5Config):
        model_type = "half_t5"

        def __init__(self, branch_scale: float = 1.0, **values: Any) -> None:
            super().__init__(**values)
            self.branch_scale = branch_scale

    class HalfT5(T5ForConditionalGeneration):
        config_class = HalfT5Config

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            for block in [*self.encoder.block, *self.decoder.block]:
                block.layer[-1].DenseReluDense.register_forward_hook(
                    lambda module, inputs, output: output * config.branch_scale
                )

    AutoConfig.register("half_t5", HalfT5Config, exist_ok=True)
    AutoModelForSeq2SeqLM.register(HalfT5Config, HalfT5, exist_ok=True)


def train_half_t5(corpus: Path, run_dir: Path, scale: float) -> list[float]:
    """On a rank of a pool, or alone."""
    register_half_t5()
    shape = {**json.loads(MODEL), "model_type": "half_t5", "branch_scale": scale}
    options = {"model.config": shape, "train.max_steps": 4, "data.max_validation_examples": 4}
    return losses(train(tiny_config(corpus, run_dir, **options), quiet=True).run_dir)


def test_an_own_model_is_sharded_evaluated_and_exported(
    pools: Any, corpus: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForSeq2SeqLM

    from t5_fsdp.checkpoint.stored_weights import read_weights
    from t5_fsdp.cli.export_hf import main as export

    sharded, _ = pools(2).run(train_half_t5, corpus, tmp_path / "two", 0.5)
    assert sharded == pytest.approx(train_half_t5(corpus, tmp_path / "one", 0.5), rel=1e-5)
    whole = train_half_t5(corpus, tmp_path / "whole", 1.0)
    assert abs(whole[0] - sharded[0]) > 1e-3  # from the same weights: its own forward was trained
    assert evaluate(tmp_path / "two", data=GIVEN["test"], quiet=True).scores["rouge1"] >= 0
    folder = tmp_path / "hf"
    assert export(["--checkpoint", str(tmp_path / "two"), "--output", str(folder)]) == 0
    model = AutoModelForSeq2SeqLM.from_pretrained(folder)
    assert type(model).__name__ == "HalfT5" and model.config.branch_scale == 0.5
    stored = read_weights(tmp_path / "two/checkpoints/step-00000004")
    assert (stored["shared.weight"] == model.get_input_embeddings().weight).all()
