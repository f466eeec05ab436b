"""What a checkpoint becomes for others, and what comes back from them."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import sys
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from t5_fsdp.checkpoint.format import complete_checkpoints, read_state
from t5_fsdp.checkpoint.stored_weights import read_weights
from t5_fsdp.errors import UserError
from t5_fsdp.model.safetensors_files import read_header, write_tensors
from tests.conftest import make_pairs, tiny_options
from tests.distributed.test_families import BASE, FAMILIES
from tests.launch import run
from tests.workers import run_command


@pytest.fixture(scope="module")
def trained(pools: Any, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 4 steps on two ranks, its last checkpoint evaluated on the test split."""
    run_dir = tmp_path_factory.mktemp("trained") / "run"
    options = {"train.max_steps": 4, "evaluation.max_examples": 5}
    code, _, err = pools(2).command("train", tiny_options(corpus, run_dir, **options))
    assert code == 0, err
    code, _, err = pools(2).command("eval_rouge", ["--checkpoint", run_dir])
    assert code == 0, err
    return run_dir


def export(checkpoint: Any, output: Any, *more: Any) -> tuple[int, str, str]:
    argv = ["--checkpoint", checkpoint, "--output", output, *more]
    return run_command("export_hf", [str(word) for word in argv])


def exported(checkpoint: Any, output: Path, *more: Any) -> Path:
    code, _, err = export(checkpoint, output, *more)
    assert code == 0, err
    return output


def refused(checkpoint: Any, output: Path, *more: Any, lines: int = 1) -> str:
    code, _, err = export(checkpoint, output, *more)
    assert code == 2 and err.startswith("error: ") and len(err.splitlines()) == lines, err
    assert not output.exists() and not list(output.parent.glob(f".{output.name}.*"))
    return err


def same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return set(one) == set(other) and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


def read(path: Path) -> dict[str, torch.Tensor]:
    """safetensors' own reading, copied: it maps the file, which tests write again."""
    return {name: tensor.clone() for name, tensor in load_file(path).items()}


class Watched(Mapping[str, torch.Tensor]):
    """Tensors made anew whenever they are asked for; counts how many are alive at a time."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors, self._alive, self.most = tensors, weakref.WeakSet(), 0  # type: ignore[var-annotated]

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = self._tensors[name].clone()
        self._alive.add(tensor)
        self.most = max(self.most, len(self._alive))
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def test_a_file_is_written_tensor_by_tensor(tmp_path: Path) -> None:
    tensors = {
        "b": torch.randn(3, 5, dtype=torch.bfloat16),
        "a": torch.randn(7, 2),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 4),
        "counts": torch.arange(5),
        "turned": torch.randn(4, 6).t(),
    }
    watched = Watched(tensors)
    layout = {name: tensor.to("meta") for name, tensor in tensors.items()}
    write_tensors(tmp_path / "file", layout, watched)
    assert watched.most == 1
    assert same(read(tmp_path / "file"), tensors)
    stored = read_header(tmp_path / "file")
    assert all(there.start % tensors[name].itemsize == 0 for name, there in stored.items())


def make_folder(corpus: Path, folder: Path, family: str, dtype: torch.dtype) -> Path:
    """A Hugging Face folder as transformers writes it, of random weights, with a tokenizer."""
    from t5_fsdp.config import ModelConfig
    from t5_fsdp.data.tokenization import load_tokenizer
    from t5_fsdp.model.build import build_with_weights, draw_weights
    from t5_fsdp.model.configuration import resolve_spec

    shape, _ = FAMILIES[family]
    shape = shape if "encoder_layers" in shape else BASE | shape
    options = ModelConfig(name=None, init="random", config=shape)
    spec = resolve_spec(options, load_tokenizer(str(corpus / "tokenizer")))
    model = build_with_weights(spec, draw_weights(spec, 3)).to(dtype)
    model.save_pretrained(folder)
    shutil.copytree(corpus / "tokenizer", folder, dirs_exist_ok=True)
    return folder


@pytest.mark.parametrize(
    ("family", "dtype"),
    [*((family, torch.float32) for family in FAMILIES), ("t5", torch.bfloat16)],
)
def test_a_hugging_face_folder_goes_and_comes_back_bit_for_bit(
    corpus: Path, tmp_path: Path, family: str, dtype: torch.dtype
) -> None:
    first = make_folder(corpus, tmp_path / "first", family, dtype)
    data = ("--data.source", "hub", "--data.dataset", "never/used")
    dcp_folder = exported(first, tmp_path / "dcp", "--format", "dcp", *data)
    assert read_state(dcp_folder).spec.own_head is FAMILIES[family][1]
    name = "bf16" if dtype == torch.bfloat16 else "fp32"
    second = exported(dcp_folder, tmp_path / "second", "--dtype", name, "--verify", "true")
    files = [read(folder / "model.safetensors") for folder in (first, second)]
    # Under the names that transformers gives them; a shared one once.
    assert same(*files)
    card = (second / "README.md").read_text()
    assert "without training" in card and "## Training" not in card and "never" not in card


def test_weights_alone_start_a_run_and_no_run_goes_on_from_them(
    pools: Any, corpus: Path, tmp_path: Path
) -> None:
    import torch.distributed.checkpoint as dcp
    from transformers import AutoModelForSeq2SeqLM

    folder = make_folder(corpus, tmp_path / "hf", "t5 v1.1 and flan", torch.float32)
    stored = read(folder / "model.safetensors")
    start = exported(folder, tmp_path / "dcp", "--format", "dcp")
    model = AutoModelForSeq2SeqLM.from_pretrained(folder).requires_grad_(False)
    plain = {name: weight.zero_() for name, weight in model.named_parameters()}
    model.requires_grad_(True)
    dcp.load({"model": dict(model.named_parameters())}, checkpoint_id=start)
    assert same(plain, stored)

    still = {"optimizer.lr": 0, "train.max_steps": 1, "model.name": start, "model.config": "{}",
             "model.init": "pretrained", "model.tokenizer": "null"}  # fmt: skip
    run_dir = tmp_path / "run"
    code, _, err = pools(2).command("train", tiny_options(corpus, run_dir, **still))
    assert code == 0, err
    assert same(read_weights(complete_checkpoints(run_dir)[-1]), stored)

    argv = tiny_options(corpus, tmp_path / "on", **still, **{"checkpoint.resume": start})
    code, _, err = pools(2).command("train", argv)
    assert code == 2 and "weights only" in err and f"model.name: {start}" in err
    assert len(err.splitlines()) == 1 and not (tmp_path / "on").exists()
    shutil.copytree(start, run_dir / "checkpoints/step-00000009")
    code, out, _ = pools(2).command("train", tiny_options(corpus, run_dir, **still))
    assert code == 0 and "step-00000009 holds the checkpoint of step 0" in out
    assert "nothing to do" in out

    text = tmp_path / "text.txt"
    text.write_text(make_pairs(1, 7)[0]["document"])
    more = ["--config", tmp_path / "run.yaml", "--evaluation.max_new_tokens", 9,
            "--parallel.param_dtype", "fp32", "--data.max_source_tokens", 64, text]  # fmt: skip
    said = [pools(1).command("summarize", ["--checkpoint", source, *more])
            for source in (folder, start)]  # fmt: skip
    assert said[0] == said[1] and said[0][0] == 0 and said[0][1].strip()
    argv = tiny_options(corpus, tmp_path / "unused")
    output = tmp_path / "scores"
    code, _, err = pools(2).command(
        "eval_rouge",
        ["--checkpoint", start, *argv[:2], *_without_model(argv[2:]), "--output_dir", output],
    )
    assert code == 0, err
    assert json.loads((output / "rouge.json").read_text())["examples"] == 11


def _without_model(words: list[str]) -> list[str]:
    pairs = zip(words[::2], words[1::2], strict=True)
    return [word for pair in pairs if not pair[0].startswith("--model.") for word in pair]


def test_a_checkpoint_without_its_optimizer(trained: Path, tmp_path: Path) -> None:
    [checkpoint] = complete_checkpoints(trained)
    light = exported(trained, tmp_path / "light", "--format", "dcp")
    assert same(read_weights(light), read_weights(checkpoint))
    sizes = [sum(path.stat().st_size for path in folder.glob("*.distcp"))
             for folder in (light, checkpoint)]  # fmt: skip
    assert sizes[0] < 0.4 * sizes[1]
    state = read_state(light)
    assert (state.step, state.weights_only) == (4, True)
    one, other = (exported(source, tmp_path / name) for name, source in
                  (("a", light), ("b", checkpoint)))  # fmt: skip
    assert same(read(one / "model.safetensors"), read(other / "model.safetensors"))


def test_bf16_in_several_files_is_verified_and_loads(trained: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForSeq2SeqLM

    more = ("--dtype", "bf16", "--max_shard_size", "20KB", "--verify", "true")
    code, out, err = export(trained, tmp_path / "hf", *more)
    assert code == 0, err
    [line] = [line for line in out.splitlines() if line.startswith("verified")]
    assert "differ by 0 at" not in line and "allowed for bf16" in line
    shards = sorted(tmp_path.glob("hf/model-*-of-*.safetensors"))
    assert len(shards) > 3 and not (tmp_path / "hf/model.safetensors").exists()
    expected = read_weights(complete_checkpoints(trained)[-1])
    found = {name: tensor for path in shards for name, tensor in read(path).items()}
    assert same(found, {name: tensor.bfloat16() for name, tensor in expected.items()})
    index = json.loads((tmp_path / "hf/model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(expected)
    assert index["metadata"]["total_size"] == 2 * sum(t.numel() for t in expected.values())
    assert json.loads((tmp_path / "hf/config.json").read_text())["dtype"] == "bfloat16"
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "hf")
    assert model.dtype == torch.bfloat16


def test_fp16_refuses_what_it_cannot_hold(corpus: Path, trained: Path, tmp_path: Path) -> None:
    exported(trained, tmp_path / "fits", "--dtype", "fp16", "--verify", "true")
    folder = make_folder(corpus, tmp_path / "large", "t5", torch.float32)
    stored = read(folder / "model.safetensors")
    name = "decoder.block.1.layer.2.DenseReluDense.wo.weight"
    stored[name][3, 4] = -70000.0
    write_tensors(folder / "model.safetensors", stored, stored)
    start = exported(folder, tmp_path / "dcp", "--format", "dcp")
    err = refused(start, tmp_path / "hf", "--dtype", "fp16")
    assert name in err and "7e+04" in err and "bf16" in err


def test_verify_finds_other_weights_and_leaves_nothing_behind(
    trained: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    from t5_fsdp.checkpoint import verification

    checkpoint = complete_checkpoints(trained)[-1]
    folder = exported(trained, tmp_path / "hf", "--verify", "true")
    stored = read(folder / "model.safetensors")
    name = "encoder.block.1.layer.0.layer_norm.weight"
    other = {**stored, name: stored[name] * 1.01}
    write_tensors(folder / "model.safetensors", other, other)
    with pytest.raises(verification.VerificationError, match="logits differ by"):
        verification.verify(checkpoint, folder, "fp32")
    fewer = {key: value for key, value in stored.items() if key != name}
    write_tensors(folder / "model.safetensors", fewer, fewer)
    with pytest.raises(verification.VerificationError, match=f"missing_keys.*{name}"):
        verification.verify(checkpoint, folder, "fp32")
    monkeypatch.setitem(verification.TOLERANCE, "bf16", 1e-6)
    err = refused(trained, tmp_path / "bf16", "--dtype", "bf16", "--verify", "true")
    assert "logits differ by" in err and "--dtype fp32" in err
    monkeypatch.setitem(verification.TOLERANCE, "fp32", -1.0)
    code, _, err = export(trained, tmp_path / "fp32", "--verify", "true")
    assert code == 1 and "VerificationError" in err
    assert not (tmp_path / "fp32").exists() and not (tmp_path / ".fp32.part").exists()


def test_all_weights_in_one_file(trained: Path, tmp_path: Path) -> None:
    checkpoint = complete_checkpoints(trained)[-1]
    path = exported(trained, tmp_path / "new/weights.safetensors", "--format", "safetensors")
    assert same(read(path), read_weights(checkpoint))
    assert [file.name for file in path.parent.iterdir()] == ["weights.safetensors"]
    code, _, err = export(trained, path, "--format", "safetensors")
    assert code == 2 and "exists" in err


def test_the_card_tells_what_the_run_wrote(trained: Path, tmp_path: Path) -> None:
    from huggingface_hub import ModelCard

    folder = exported(trained, tmp_path / "model")
    card = ModelCard.load(folder / "README.md")
    assert (card.data.library_name, card.data.pipeline_tag) == ("transformers", "summarization")
    assert card.data.base_model is None and card.data.datasets is None and card.data.license is None
    results = {(r.dataset_split, r.metric_name): r.metric_value for r in card.data.eval_results}
    evaluation = trained / "evaluation/step-00000004"
    expected = {}
    for split in ("test", "validation"):
        scores = json.loads((evaluation / split / "rouge.json").read_text())["scores"]
        for metric, label in (("rouge1", "ROUGE-1"), ("rouge2", "ROUGE-2"), ("rougeL", "ROUGE-L"),
                              ("rougeLsum", "ROUGE-Lsum")):  # fmt: skip
            expected[split, label] = round(100 * scores[metric]["fmeasure"], 2)
    assert results == expected
    names = {r.dataset_split: r.dataset_name for r in card.data.eval_results}
    assert names == {"test": "test.jsonl", "validation": "validation.jsonl"}
    loss = read_state(complete_checkpoints(trained)[-1]).scores["4"]["loss"]
    for row in (
        f"| test | 11 | {expected['test', 'ROUGE-1']:.2f} |",
        f"| validation | 5 | {expected['validation', 'ROUGE-1']:.2f} |",
        "| data | train.jsonl |", "| examples | 60 train, 13 validation, 11 test |",
        "| steps | 4 |", "| epochs | 1 |", "| examples seen | 60 |", "| global batch size | 16 |",
        "| peak learning rate | 0.01 |", "| schedule | constant, 0 warm-up steps |",
        f"| validation loss | {loss:.4f} nats a token |", "| hardware | 2 x CPU |",
        f"torch {torch.__version__}", "A t5 model with random weights, trained",
    ):  # fmt: skip
        assert row in card.text, row
    assert str(trained) not in card.content


def test_what_is_not_known_is_left_out_of_the_card(trained: Path, tmp_path: Path) -> None:
    from huggingface_hub import ModelCard

    alone = tmp_path / "alone"
    shutil.copytree(complete_checkpoints(trained)[-1], alone)
    (alone / "scores.json").unlink()
    card = ModelCard.load(exported(alone, tmp_path / "model") / "README.md")
    assert card.data.eval_results is None and "## Results" not in card.text
    for word in ("| hardware", "| examples", "| epochs", "| validation loss", "None", "nan"):
        assert word not in card.text, word
    assert "| steps | 4 |" in card.text


def test_the_snippet_of_the_card_does_what_summarize_does(
    trained: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    folder = exported(trained, tmp_path / "model")
    code = (folder / "README.md").read_text().split("```python\n")[1].split("```")[0]
    (tmp_path / "article.txt").write_text(make_pairs(1, 7)[0]["document"])
    monkeypatch.chdir(tmp_path)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {})
    argv = ["--checkpoint", str(trained), "--parallel.param_dtype", "fp32", "article.txt"]
    _, out, _ = run_command("summarize", argv)
    assert printed.getvalue() == out and out.strip()


def test_the_base_in_the_card_is_a_hub_id_or_none(tmp_path: Path, monkeypatch: Any) -> None:
    from t5_fsdp.checkpoint import model_card

    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    found = {}
    for name in ("google-t5/t5-small", "t5-small", "runs/gone", "runs", "/models/t5", None):
        options = {"model": {"name": name, "init": "pretrained"}}
        run_facts = model_card._Run(None, options, {}, {}, {}, {})  # type: ignore[arg-type]
        found[name] = model_card._base_on_hub(run_facts)
    hub = ("google-t5/t5-small", "t5-small")
    assert found == {name: name if name in hub else None for name in found}


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--push_to_hub", "a/b/c"), ("--push_to_hub 'a/b/c'", "repository id")),
        (("--push_to_hub", "me/it"), ("HF_HUB_OFFLINE is set",)),
        (("--private", "true"), ("--push_to_hub",)),
        (("--max_shard_size", "5"), ("'5'", "5GB")),
        (("--max_shard_size", "0GB"), ("'0GB'",)),
        (("--dtype", "int8"), ("int8", "fp32, bf16, fp16")),
        (("--format", "adapter", "--dtype", "bf16"), ("--dtype is for --format hf or safetens",)),
        (("--format", "dcp", "--push_to_hub", "me/it"), ("--push_to_hub is for", "not dcp")),
    ],
)
def test_options_that_make_no_export(
    trained: Path, tmp_path: Path, more: tuple[str, ...], words: tuple[str, ...]
) -> None:
    err = refused(trained, tmp_path / "hf", *more)
    assert all(word in err for word in words), err


def test_all_problems_at_once_and_what_is_no_checkpoint(corpus: Path, tmp_path: Path) -> None:
    more = ("--format", "dcp", "--verify", "true", "--private", "true", "--max_shard_size", "x")
    assert "--verify" in refused("runs/nope", tmp_path / "hf", *more, lines=4)
    assert "no checkpoint or run folder" in refused("runs/nope", tmp_path / "hf")
    folder = make_folder(corpus, tmp_path / "t5", "t5", torch.float32)
    assert "--format dcp" in refused(folder, tmp_path / "hf")


def test_a_hub_that_is_not_reached_is_one_line_before_the_export(
    trained: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    import huggingface_hub
    from huggingface_hub import constants

    from t5_fsdp.checkpoint import hub

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    assert "hf auth login" in refused(trained, tmp_path / "hf", "--push_to_hub", "me/it")
    monkeypatch.undo()
    # The Hub's client itself refuses to go out in this mode: what pushing raises then.
    with pytest.raises(UserError, match=r"--push_to_hub me/it failed .*the exported folder is"):
        hub.push(tmp_path, "me/it", private=True)


def test_a_run_exports_its_best_at_the_end(pools: Any, corpus: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    options = {"checkpoint.export_at_end": "true", "train.max_steps": 4, "optimizer.lr": "1.0",
               "checkpoint.every_steps": 1, "evaluation.every_steps": 1,
               "evaluation.best_metric": "loss", "evaluation.max_examples": 4}  # fmt: skip
    argv = tiny_options(corpus, run_dir, **options)
    code, out, err = pools(2).command("train", argv)
    assert code == 0, err
    scores = read_state(complete_checkpoints(run_dir)[-1]).scores
    best = min(scores, key=lambda step: scores[step]["loss"])
    assert best != "4"
    checkpoint = run_dir / f"checkpoints/step-{int(best):08d}"
    assert f"exported {checkpoint} to {run_dir / 'hf'}" in out
    assert same(read(run_dir / "hf/model.safetensors"), read_weights(checkpoint))
    assert json.loads((run_dir / "status.json").read_text())["state"] == "finished"
    # The same command again leaves it alone, and makes up for one that is missing or old.
    code, out, _ = pools(2).command("train", argv)
    assert code == 0 and "exported" not in out
    (run_dir / "hf/t5_fsdp.json").write_text('{"checkpoint_digest": "of another"}')
    code, out, _ = pools(2).command("train", argv)
    assert code == 0 and "exported" in out
    # What is not ours is not replaced, and is told before the first step.
    (run_dir / "hf/t5_fsdp.json").rename(run_dir / "hf/mine.json")
    code, _, err = pools(2).command("train", [*argv, "--train.max_steps", "5"])
    assert code == 2 and "no export of this program" in err
    assert len(complete_checkpoints(run_dir)) == 3 and (run_dir / "hf/mine.json").is_file()
    shutil.rmtree(run_dir / "hf")
    code, out, _ = pools(2).command("train", argv)
    assert code == 0 and "exported" in out and (run_dir / "hf/README.md").is_file()
    assert not list(run_dir.glob(".hf*"))


MEMORY = """
import resource, sys
from t5_fsdp.cli.export_hf import main
from t5_fsdp.checkpoint import export, weights_only
from transformers import AutoTokenizer, T5ForConditionalGeneration
def peak():
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
before = peak()
assert main(sys.argv[1:]) == 0
print(peak() - before)
"""


@pytest.mark.long
def test_memory_of_an_export(tmp_path: Path) -> None:
    """60 M parameters: the growth of the resident memory against one float32 copy."""
    from transformers import T5Config

    from t5_fsdp.checkpoint.format import RunState
    from t5_fsdp.checkpoint.weights_only import write_weights
    from t5_fsdp.cli.options import dump_yaml
    from t5_fsdp.config import Config
    from t5_fsdp.data.tokenization import train_tokenizer
    from t5_fsdp.model.build import ModelSpec, draw_weights

    shape = {"vocab_size": 32128, "d_model": 512, "d_ff": 2048, "num_layers": 6, "num_heads": 8}
    spec = ModelSpec(T5Config(**shape, d_kv=64, decoder_start_token_id=0), own_head=False)
    weights = draw_weights(spec, 0)
    num_bytes = 4 * sum(tensor.numel() for tensor in weights.values())
    train_tokenizer([row["document"] for row in make_pairs(200, 9)], 180, tmp_path / "tokenizer")
    state = RunState(0, spec.to_json(), "", "", {}, {}, {}, {}, "")
    start = tmp_path / "start"
    write_weights(start, weights, state, dump_yaml(Config()), tmp_path / "tokenizer")
    for name, most in (("hf", 0.9), ("dcp", 1.3)):
        argv = ["--checkpoint", start, "--output", tmp_path / name, "--format", name]
        done = run([sys.executable, "-c", MEMORY, *map(str, argv)])
        assert done.returncode == 0, done.stderr
        growth = int(done.stdout.split()[-1]) / num_bytes
        assert growth < most, f"{name}: {growth:.2f} of a copy"
