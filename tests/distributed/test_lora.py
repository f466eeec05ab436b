"""A run with `model.adapter: lora` from its base to its exports, through the commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import make_pairs, read_metrics, tiny_options

SHAPE = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
LORA = {"model.adapter": "lora", "model.lora_rank": 4, "model.lora_alpha": 8}


@pytest.fixture(
    scope="module",
    params=[False, pytest.param(True, marks=pytest.mark.long)],
    ids=["tied", "own head"],
)
def base(request: Any, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder with a random T5 and the corpus' tokenizer, by transformers alone."""
    from transformers import AutoTokenizer, T5Config, T5ForConditionalGeneration

    folder = tmp_path_factory.mktemp("base") / "t5"
    tokenizer = AutoTokenizer.from_pretrained(corpus / "tokenizer")
    torch.manual_seed(5)
    model = T5ForConditionalGeneration(
        T5Config(
            vocab_size=256,
            dropout_rate=0.0,
            decoder_start_token_id=tokenizer.pad_token_id,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            **SHAPE,
        )
    )
    if request.param:
        model.lm_head.weight = torch.nn.Parameter(0.2 * torch.randn(256, 32))
        model.config.tie_word_embeddings = False
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def options(corpus: Path, base: Path, run_dir: Path, **more: Any) -> list[str]:
    values = {
        "model.name": base,
        "model.init": "pretrained",
        "model.tokenizer": "null",
        "model.config": "{}",
        "train.max_steps": 6,
        "checkpoint.every_steps": 3,
        "evaluation.max_examples": 5,
    }
    return tiny_options(corpus, run_dir, **{**values, **LORA, **more})


@pytest.fixture(scope="module")
def trained(
    pools: Any, corpus: Path, base: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, str]:
    run_dir = tmp_path_factory.mktemp("lora") / "run"
    code, out, err = pools(2).command("train", options(corpus, base, run_dir))
    assert code == 0, err
    return run_dir, out


def losses(run_dir: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(run_dir, "train")]


def checkpoint(run_dir: Path, step: int = 6) -> Path:
    return run_dir / "checkpoints" / f"step-{step:08d}"


def test_the_adapter_learns_and_the_base_stays(trained: tuple[Path, str], base: Path) -> None:
    from transformers import T5ForConditionalGeneration

    from t5_fsdp.checkpoint.format import read_state
    from t5_fsdp.checkpoint.stored_weights import read_weights

    run_dir, out = trained
    weights = read_weights(checkpoint(run_dir))
    pairs = {name for name in weights if "lora_" in name}
    count = sum(weights[name].numel() for name in pairs)
    assert f"of which an adapter's {count:,} train" in out
    assert losses(run_dir)[-1] < losses(run_dir)[0] - 0.1
    plain = T5ForConditionalGeneration.from_pretrained(base)
    renamed = {name.replace("base_layer.", ""): weights[name] for name in weights.keys() - pairs}
    given = dict(plain.named_parameters())
    assert renamed.keys() == given.keys()
    assert all(torch.equal(renamed[name], given[name]) for name in given)
    adapter = read_state(checkpoint(run_dir)).spec.adapter
    assert adapter is not None and adapter.targets == ["k", "o", "q", "v", "wi", "wo"]


def test_the_checkpoint_holds_no_moment_of_the_base(trained: tuple[Path, str]) -> None:
    from torch.distributed.checkpoint import FileSystemReader

    stored = FileSystemReader(checkpoint(trained[0])).read_metadata().state_dict_metadata
    moments = {name for name in stored if name.startswith("optimizer.state")}
    assert moments and all("lora_" in name for name in moments)
    assert len(moments) == 3 * sum("lora_" in name for name in stored if name.startswith("model."))


@pytest.mark.parametrize(
    ("engine", "world_size", "next_engine", "next_world_size"),
    [
        ("fsdp1", 2, "ddp", 1),
        pytest.param("ddp", 2, "fsdp1", 1, marks=pytest.mark.long),
        pytest.param("fsdp1", 1, "fsdp2", 2, marks=pytest.mark.long),
    ],
)
def test_it_resumes_under_another_engine_and_another(
    pools: Any,
    corpus: Path,
    base: Path,
    trained: tuple[Path, str],
    tmp_path: Path,
    engine: str,
    world_size: int,
    next_engine: str,
    next_world_size: int,
) -> None:
    run_dir = tmp_path / "run"
    start = {"checkpoint.resume": checkpoint(trained[0], 3)}
    for name, size, steps in ((engine, world_size, 5), (next_engine, next_world_size, 6)):
        more = {"parallel.engine": name, "train.max_steps": steps}
        code, out, err = pools(size).command(
            "train", options(corpus, base, run_dir, **start, **more)
        )
        assert code == 0, err
    assert "(step 5)" in out
    assert losses(run_dir) == pytest.approx(losses(trained[0])[3:], rel=1e-5)


def test_it_is_evaluated_as_it_was_validated(
    pools: Any, trained: tuple[Path, str], tmp_path: Path
) -> None:
    run_dir, _ = trained
    validated = run_dir / "evaluation/step-00000006/validation/predictions.jsonl"
    argv = ["--checkpoint", str(run_dir), "--split", "validation", "--output_dir", tmp_path]
    code, _, err = pools(2).command("eval_rouge", argv)
    assert code == 0, err
    rows = [(tmp_path / "predictions.jsonl").read_text(), validated.read_text()]
    whole, some = ({row["id"]: row["prediction"] for row in map(json.loads, text.splitlines())}
                   for text in rows)  # fmt: skip
    assert len(some) == 5 and some.items() <= whole.items()


def ids(folder: Path) -> dict[str, torch.Tensor]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer("summarize: rinse rice blue door.", return_tensors="pt")
    return {"input_ids": inputs.input_ids, "labels": torch.tensor([[7, 8, 1]])}


def test_exports_compute_what_the_checkpoint_does(
    pools: Any, base: Path, trained: tuple[Path, str], tmp_path: Path
) -> None:
    from peft import PeftModel
    from safetensors.torch import load_file
    from transformers import AutoModelForSeq2SeqLM

    from t5_fsdp.checkpoint.format import read_state
    from t5_fsdp.checkpoint.stored_weights import read_weights
    from t5_fsdp.model.build import build_with_weights

    merged, alone = tmp_path / "merged", tmp_path / "adapter"
    text = tmp_path / "text.txt"
    text.write_text(make_pairs(1, 7)[0]["document"])
    argv = ["--checkpoint", str(checkpoint(trained[0])), "--output"]
    for output, more in ((merged, []), (alone, ["--format", "adapter"])):
        code, _, err = pools(1).command("export_hf", [*argv, str(output), *more])
        assert code == 0, err
    state = read_state(checkpoint(trained[0]))
    ours = build_with_weights(state.spec, read_weights(checkpoint(trained[0]))).eval()
    plain = AutoModelForSeq2SeqLM.from_pretrained(base, dtype=torch.float32)
    theirs = PeftModel.from_pretrained(plain, alone).eval()
    whole = AutoModelForSeq2SeqLM.from_pretrained(merged, dtype=torch.float32).eval()
    inputs = ids(alone)
    with torch.no_grad():
        expected = ours(**inputs).logits
        torch.testing.assert_close(theirs(**inputs).logits, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(whole(**inputs).logits, expected, rtol=1e-5, atol=1e-5)
        unadapted = AutoModelForSeq2SeqLM.from_pretrained(base, dtype=torch.float32)(**inputs)
    assert (unadapted.logits - expected).abs().max() > 0.01
    # Ours against the file that peft itself writes.
    theirs.save_pretrained(tmp_path / "again")
    files = [load_file(folder / "adapter_model.safetensors")
             for folder in (alone, tmp_path / "again")]  # fmt: skip
    assert files[0].keys() == files[1].keys()
    assert all(torch.equal(files[0][name], files[1][name]) for name in files[0])
    stored = json.loads((alone / "adapter_config.json").read_text())
    assert stored["base_model_name_or_path"] == str(base)
    reference = dict(theirs.merge_and_unload().named_parameters())
    assert reference.keys() == dict(whole.named_parameters()).keys()
    assert all(torch.equal(weight, reference[name]) for name, weight in whole.named_parameters())
    assert len({path.stat().st_mode for path in alone.iterdir()}) == 1
    said = [
        pools(1).command("summarize", ["--checkpoint", source, "--parallel.param_dtype", "fp32",
                                       text])
        for source in (trained[0], merged)
    ]  # fmt: skip
    assert said[0] == said[1] and said[0][0] == 0 and said[0][1].strip()


def test_an_adapter_that_is_not_there_is_not_exported(
    pools: Any, corpus: Path, base: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    plain = {"model.adapter": "null", "model.lora_rank": 16, "model.lora_alpha": 32}
    argv = options(corpus, base, run_dir, **plain, **{"train.max_steps": 1})
    assert pools(1).command("train", argv)[0] == 0
    argv = ["--checkpoint", str(run_dir), "--output", str(tmp_path / "out"), "--format", "adapter"]
    code, _, err = pools(1).command("export_hf", argv)
    assert code == 2 and "holds no adapter" in err and len(err.splitlines()) == 1


def test_resume_refuses_another_adapter(
    pools: Any, corpus: Path, base: Path, trained: tuple[Path, str], tmp_path: Path
) -> None:
    start = {"checkpoint.resume": checkpoint(trained[0]), "train.max_steps": 7}
    none = {"model.adapter": "null", "model.lora_rank": 16, "model.lora_alpha": 32}
    for more, words in (
        ({"model.lora_rank": 2}, "model.lora_rank is 4 there and 2 now"),
        ({"model.lora_alpha": 4}, "model.lora_alpha is 8.0 there and 4.0 now"),
        ({"model.lora_targets": '["q", "v"]'}, "model.lora_targets is k, o, q, v, wi, wo there"),
        (none, "model.adapter is lora there and null now"),
    ):
        argv = options(corpus, base, tmp_path / "run", **start, **more)
        code, _, err = pools(1).command("train", argv)
        assert code == 2 and words in err, err
    dropout = {**start, "model.lora_dropout": 0.1}
    code, _, err = pools(1).command("train", options(corpus, base, tmp_path / "run", **dropout))
    assert code == 0, err


def test_warm_starts_between_models_with_and_without_adapter(
    pools: Any, corpus: Path, base: Path, trained: tuple[Path, str], tmp_path: Path
) -> None:
    from t5_fsdp.checkpoint.stored_weights import read_weights

    still = {"optimizer.lr": 0, "train.max_steps": 1}
    none = {"model.adapter": "null", "model.lora_rank": 16, "model.lora_alpha": 32}

    def run(ranks: int, name: str, start: Path, **more: Any) -> dict[str, torch.Tensor]:
        argv = options(corpus, start, tmp_path / name, **still, **more)
        code, _, err = pools(ranks).command("train", argv)
        assert code == 0, err
        return dict(read_weights(checkpoint(tmp_path / name, 1)))

    first = dict(read_weights(checkpoint(trained[0])))
    again = run(1, "same", checkpoint(trained[0]))
    assert all(torch.equal(again[name], first[name]) for name in first)
    merged = run(1, "merged", checkpoint(trained[0]), **none)
    name = "encoder.block.0.layer.0.SelfAttention.q"
    pair = first[f"{name}.lora_B.default.weight"] @ first[f"{name}.lora_A.default.weight"]
    expected = first[f"{name}.base_layer.weight"] + 2 * pair  # alpha 8 over rank 4
    assert torch.equal(merged[f"{name}.weight"], expected)
    assert not any("lora_" in name for name in merged)
    fresh = run(2, "fresh", checkpoint(tmp_path / "merged", 1), **{"model.lora_targets": "q"})
    assert torch.equal(fresh[f"{name}.base_layer.weight"], expected)
    assert not fresh[f"{name}.lora_B.default.weight"].any()
    assert fresh[f"{name}.lora_A.default.weight"].any()
    argv = options(corpus, checkpoint(trained[0]), tmp_path / "other", **{"model.lora_rank": 2})
    code, _, err = pools(1).command("train", argv)
    assert code == 2 and "model.lora_rank is 4 there and 2 now" in err


def test_adafactor_is_warned_of(pools: Any, corpus: Path, tmp_path: Path) -> None:
    for adapter, warned in (("lora", True), ("null", False)):
        more = {"optimizer.name": "adafactor", "model.adapter": adapter}
        argv = tiny_options(corpus, tmp_path / "run", **more)
        code, out, err = pools(1).command("train", [*argv, "--check", "true"])
        assert code == 0, err
        assert ("it hardly learns" in out) is warned
        assert ("of which an adapter's" in out) is warned


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"model.lora_targets": '["q", "p"]'}, ("p is no linear layer", "k, o, q, v, wi, wo")),
        ({"model.lora_targets": '["lm_head"]'}, ("lm_head", "output head")),
        ({"model.lora_targets": "shared"}, ("shared", "embedding")),
        ({"model.lora_targets": "[]"}, ("model.lora_targets", "no name")),
        ({"model.lora_rank": 0}, ("model.lora_rank is 0", "1")),
        ({"model.lora_alpha": 0}, ("model.lora_alpha", "above 0")),
        ({"model.lora_dropout": 1}, ("model.lora_dropout", "below 1")),
        ({"model.adapter": "null", "model.lora_alpha": 32}, ("model.lora_rank is 4", "16")),
        (
            {"parallel.compile": "true", "parallel.compile_backend": "aot_eager",
             "parallel.engine": "fsdp1"},
            ("parallel.compile with model.adapter", "fsdp2"),
        ),
    ],
)  # fmt: skip
def test_options_that_make_no_adapter(
    pools: Any, corpus: Path, tmp_path: Path, values: dict[str, Any], words: tuple[str, ...]
) -> None:
    argv = tiny_options(corpus, tmp_path / "run", **{**LORA, **values})
    code, _, err = pools(1).command("train", argv)
    assert code == 2 and len(err.splitlines()) == 1, err
    assert all(word in err for word in words), err
