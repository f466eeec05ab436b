"""Weights of Hugging Face folders: as transformers loads them, but read one by one."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from t5_fsdp.config import ModelConfig
from t5_fsdp.errors import UserError
from t5_fsdp.model.build import ModelSpec, draw_weights, unique_state_dict
from t5_fsdp.model.pretrained import InitialWeights, load_pretrained, open_pretrained

SHAPE = {"vocab_size": 33, "d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2}
EMBEDDINGS = ("shared.weight", "lm_head.weight")
LEGACY = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"


def spec_of(model_type: str = "t5", **changes: Any) -> ModelSpec:
    from transformers import AutoConfig

    config = AutoConfig.for_model(model_type, decoder_start_token_id=0, **SHAPE | changes)
    return ModelSpec(config, own_head=False)


def tensors(model_type: str = "t5") -> dict[str, torch.Tensor]:
    """Of a model with an output head of its own."""
    spec = spec_of(model_type)
    spec.own_head = True
    return draw_weights(spec, seed=1)


def write(folder: Path, weights: dict[str, torch.Tensor], model_type: str = "t5") -> Path:
    """A folder as of the Hub, in two files and an index."""
    folder.mkdir()
    spec_of(model_type).config.save_pretrained(folder)
    names = sorted(weights)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for part, held in parts.items():
        save_file({n: weights[n].clone() for n in held}, folder / part, {"format": "pt"})
    placed = {name: part for part, held in parts.items() for name in held}
    index = {"metadata": {}, "weight_map": placed}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def opened_and_loaded(
    folder: Path, model_type: str = "t5"
) -> tuple[InitialWeights, dict[str, torch.Tensor], bool]:
    """What we make of a folder, and what transformers does."""
    options = ModelConfig(name=str(folder))
    opened = open_pretrained(options, spec_of(model_type))
    weights, own_head = load_pretrained(options, spec_of(model_type))
    return opened, weights, own_head


def check_same(opened: InitialWeights, weights: dict[str, torch.Tensor], own_head: bool) -> None:
    assert opened.own_head is own_head
    assert set(opened.tensors) == set(weights)
    for name, expected in weights.items():
        found = opened.tensors[name]
        assert found.dtype == torch.float32 and torch.equal(found, expected), name


# Names under which the embedding ("e") and a head of its own ("h") stand in the files, and whether
# the head is then the model's own.
HEADS: dict[str, tuple[dict[str, str], bool]] = {
    "tied": ({"shared.weight": "e"}, False),
    "tied, stored twice": ({"shared.weight": "e", "lm_head.weight": "e"}, False),
    "own head": ({"shared.weight": "e", "lm_head.weight": "h"}, True),
    "all four names": (
        {"shared.weight": "e", "encoder.embed_tokens.weight": "e",
         "decoder.embed_tokens.weight": "e", "lm_head.weight": "h"},
        True,
    ),
    "under the encoder's name": (
        {"encoder.embed_tokens.weight": "e", "lm_head.weight": "h"}, True,
    ),
    "under the head's name": ({"lm_head.weight": "e"}, False),
}  # fmt: skip


@pytest.mark.parametrize("model_type", ["t5", "mt5", "umt5"])
@pytest.mark.parametrize("case", HEADS)
def test_the_head_is_what_transformers_says(tmp_path: Path, case: str, model_type: str) -> None:
    stored, is_own = HEADS[case]
    weights = tensors(model_type)
    sources = {"e": weights.pop("shared.weight"), "h": weights.pop("lm_head.weight")}
    weights |= {name: sources[which] for name, which in stored.items()}
    folder = write(tmp_path / "hf", weights, model_type)
    opened, expected, own_head = opened_and_loaded(folder, model_type)
    check_same(opened, expected, own_head)
    assert own_head is is_own and opened.note is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_files_of_another_dtype_become_float32(tmp_path: Path, dtype: torch.dtype) -> None:
    weights = {name: tensor.to(dtype) for name, tensor in tensors().items()}
    opened, expected, own_head = opened_and_loaded(write(tmp_path / "hf", weights))
    check_same(opened, expected, own_head)
    assert opened.note is None


def test_what_old_files_hold_besides_is_left_out(tmp_path: Path) -> None:
    opened, expected, own_head = opened_and_loaded(
        write(tmp_path / "hf", tensors() | {LEGACY: torch.zeros(32, 2)})
    )
    check_same(opened, expected, own_head)
    assert opened.note is None


def test_a_hub_id_is_read_from_the_cache(tmp_path: Path, monkeypatch: Any) -> None:
    from huggingface_hub import constants

    repository = tmp_path / "models--someone--a-t5"
    (repository / "snapshots").mkdir(parents=True)
    write(repository / "snapshots/0a1b", tensors())
    (repository / "refs").mkdir()
    (repository / "refs/v2").write_text("0a1b")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    options = ModelConfig(name="someone/a-t5", revision="v2")
    check_same(open_pretrained(options, spec_of()), tensors(), True)
    with pytest.raises(UserError, match="someone/a-t5 is neither a folder here nor readable"):
        open_pretrained(ModelConfig(name="someone/a-t5", revision="v3"), spec_of())


def pickled(folder: Path) -> str:
    weights = load_file(folder / "a.safetensors") | load_file(folder / "b.safetensors")
    for path in folder.glob("*safetensors*"):
        path.unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    return "has no safetensors files"


def one_more(folder: Path) -> str:
    weights = load_file(folder / "a.safetensors")
    save_file(weights | {"more.weight": torch.zeros(2)}, folder / "a.safetensors", {"format": "pt"})
    return "holds more.weight"


def other_embedding(folder: Path) -> str:
    weights = load_file(folder / "a.safetensors")
    more = {"decoder.embed_tokens.weight": torch.zeros(33, 8)}
    save_file(weights | more, folder / "a.safetensors", {"format": "pt"})
    return "differ for shared.weight"


@pytest.mark.parametrize("change", [pickled, one_more, other_embedding])
def test_what_is_not_read_directly_is_loaded_by_transformers(
    tmp_path: Path, change: Callable[[Path], str]
) -> None:
    folder = write(tmp_path / "hf", tensors())
    reason = change(folder)
    opened, expected, own_head = opened_and_loaded(folder)
    check_same(opened, expected, own_head)
    assert reason in str(opened.note) and "rank 0's memory" in str(opened.note)


def test_what_a_pegasus_file_may_lack_is_computed(tmp_path: Path) -> None:
    """Its positions are never trained, so that the files on the Hub are without them."""
    from transformers import PegasusConfig, PegasusForConditionalGeneration

    config = PegasusConfig(
        vocab_size=33, d_model=8, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=16,
        decoder_ffn_dim=16, encoder_attention_heads=2, decoder_attention_heads=2,
        max_position_embeddings=12,
    )  # fmt: skip
    model = PegasusForConditionalGeneration(config)
    folder = tmp_path / "hf"
    model.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    kept = {
        name: tensor
        for name, tensor in weights.items()
        if "embed_positions" not in name and name != "final_logits_bias"
    }
    assert len(kept) == len(weights) - 3
    options = ModelConfig(name=str(folder))
    direct = open_pretrained(options, ModelSpec(config, own_head=False))
    assert direct.note is None
    check_same(direct, unique_state_dict(model), False)
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    computed = open_pretrained(options, ModelSpec(config, own_head=False))
    assert "lacks final_logits_bias" in str(computed.note)
    check_same(computed, unique_state_dict(model), False)


def cut(folder: Path) -> str:
    path = folder / "b.safetensors"
    os.truncate(path, path.stat().st_size - 1)
    return r"b\.safetensors can't be read \(it has \d+ bytes and should have \d+\)"


def cut_header(folder: Path) -> str:
    os.truncate(folder / "b.safetensors", 100)
    return r"b\.safetensors can't be read \(its header is longer than the file\)"


def empty(folder: Path) -> str:
    os.truncate(folder / "b.safetensors", 0)
    return r"b\.safetensors can't be read"


def scribble(folder: Path) -> str:
    path = folder / "b.safetensors"
    path.write_bytes(path.read_bytes()[:9] + b"?" + path.read_bytes()[10:])
    return r"b\.safetensors can't be read \(its header is no JSON"


def without_shape(folder: Path) -> str:
    header = b'{"a":{"dtype":"F32","data_offsets":[0,0]}}'
    (folder / "b.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    return r"b\.safetensors can't be read \(its header is wrong"


def remove(folder: Path) -> str:
    (folder / "b.safetensors").unlink()
    return r"b\.safetensors, which model\.safetensors\.index\.json names, is missing"


def break_index(folder: Path) -> str:
    (folder / "model.safetensors.index.json").write_text("[]")
    return r"model\.safetensors\.index\.json is damaged"


@pytest.mark.parametrize(
    "damage", [cut, cut_header, empty, scribble, without_shape, remove, break_index]
)
def test_damaged_files_are_refused_by_name(tmp_path: Path, damage: Callable[[Path], str]) -> None:
    folder = write(tmp_path / "hf", tensors())
    message = damage(folder)
    with pytest.raises(UserError, match=message) as error:
        open_pretrained(ModelConfig(name=str(folder)), spec_of())
    assert len(error.value.problems) == 1


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    weights = tensors()
    del weights["encoder.final_layer_norm.weight"]
    folder = write(tmp_path / "hf", weights)
    lacking = "lack 1 tensors, e.g. encoder.final_layer_norm.weight"
    with pytest.raises(UserError, match=re.escape(lacking)):
        open_pretrained(ModelConfig(name=str(folder)), spec_of())
    folder = write(tmp_path / "other", tensors())
    with pytest.raises(UserError, match=r"is \[16, 8\] there and \[24, 8\] in the model"):
        open_pretrained(ModelConfig(name=str(folder)), spec_of(d_ff=24))


def test_a_file_that_is_cut_after_it_was_checked_is_no_defect(tmp_path: Path) -> None:
    folder = write(tmp_path / "hf", tensors())
    opened = open_pretrained(ModelConfig(name=str(folder)), spec_of())
    for path in folder.glob("*.safetensors"):
        os.truncate(path, 2000)
    with pytest.raises(UserError, match=r"safetensors can't be read \(it ends early\)"):
        dict(opened.tensors)
