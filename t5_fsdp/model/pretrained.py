"""Pretrained weights of a Hugging Face folder or Hub id, checked first and read tensor by tensor.

What is in the files is compared with the model by the files' headers alone, so that weights that
do not fit are refused before anything is written, and no whole copy of the model is ever in memory.
Files that need transformers' own loading (pickles, renamed or quantized tensors) go through it.
"""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError

from t5_fsdp.config import ModelConfig
from t5_fsdp.errors import UserError
from t5_fsdp.model.build import (
    HEAD,
    ModelSpec,
    StateDict,
    build_on_meta,
    draw_weights,
    fit_adapter,
    has_own_head,
    shared_names,
    unique_state_dict,
)
from t5_fsdp.model.configuration import unreadable_name
from t5_fsdp.model.safetensors_files import FileWeights, StoredTensor, are_equal, read_header

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass
class InitialWeights:
    """What a run starts with, on rank 0.

    Attributes:
        tensors: by name as of `unique_state_dict`; float32 on the CPU, maybe read when asked for.
        own_head: the output head is a weight of its own.
        note: something that the user should know.
    """

    tensors: Mapping[str, torch.Tensor]
    own_head: bool
    note: str | None = None


def initial_weights(options: ModelConfig, spec: ModelSpec, seed: int) -> InitialWeights:
    """Random or pretrained weights, as the options say, beside them those of a new adapter.

    Raises as `open_pretrained`.
    """
    if options.init == "random":
        opened = InitialWeights(draw_weights(spec, seed), spec.own_head)
    else:
        opened = open_pretrained(options, spec)
    whole = replace(spec, own_head=opened.own_head)
    return replace(opened, tensors=fit_adapter(opened.tensors, None, whole, seed))


def open_pretrained(options: ModelConfig, spec: ModelSpec) -> InitialWeights:
    """The weights of `options.name`, to be read later; no adapter's are among them.

    Whether the head is its own is found out from the weights, as transformers does: it is when
    embedding and head are both in the files and differ.

    Raises:
        UserError: no weights there, damaged ones, or their names or shapes differ from the
            configuration's.
    """
    assert options.name is not None
    files = _find_files(options.name, options.revision)
    if not files:
        return _load_whole(options, spec, "has no safetensors files")
    # Tied as transformers ties it by the configuration; the files say whether that is so.
    model = build_on_meta(ModelSpec(spec.config, own_head=False))
    stored = _without_ignored(
        {name: tensor for path in files for name, tensor in read_header(path).items()}, model
    )
    ties = {group[0]: group for group in shared_names(model)}
    names = {name: ties.get(name, [name]) for name in unique_state_dict(model)}
    if reason := _needs_transformers(stored, names, model):
        return _load_whole(options, spec, reason)
    chosen: dict[str, StoredTensor] = {}
    own_head = has_own_head(model)
    for first, aliases in names.items():
        present = [name for name in aliases if name in stored]
        if len(present) > 1 and HEAD in present and _differ(stored, [present[0], HEAD]):
            own_head = True
            chosen[HEAD] = stored[HEAD]
            present.remove(HEAD)
        if _differ(stored, present):
            return _load_whole(options, spec, f"holds tensors that differ for {first}")
        if present:
            chosen[first] = stored[present[0]]
    final = build_on_meta(ModelSpec(spec.config, own_head))
    _check(options.name, chosen, unique_state_dict(final))
    return InitialWeights(FileWeights(chosen), own_head)


def _differ(stored: dict[str, StoredTensor], names: list[str]) -> bool:
    return not all(are_equal(stored[names[0]], stored[name]) for name in names[1:])


def _check(name: str, chosen: dict[str, StoredTensor], wanted: StateDict) -> None:
    missing = sorted(set(wanted) - set(chosen))
    if missing:
        raise UserError(
            f"the weights of model.name: {name} lack {len(missing)} tensors, e.g. {missing[0]}; "
            "check model.config and the folder"
        )
    for tensor, there in chosen.items():
        shape = tuple(wanted[tensor].shape)
        if there.shape != shape:
            raise UserError(
                f"the weights of model.name: {name} do not fit its configuration; remove values "
                f"from model.config that change shapes ({tensor} is {list(there.shape)} there and "
                f"{list(shape)} in the model)"
            )


def _needs_transformers(
    stored: dict[str, StoredTensor], names: dict[str, list[str]], model: PreTrainedModel
) -> str | None:
    """Why these tensors can't be taken as they are, or None.

    Args:
        names: of each tensor of the model, all under which it may be stored.
    """
    known = {name for aliases in names.values() for name in aliases}
    if unknown := sorted(set(stored) - known):
        return f"holds {unknown[0]}, which is no name in the model"
    odd = [n for n, t in stored.items() if t.dtype is None or not t.dtype.is_floating_point]
    if odd:
        return f"holds {odd[0]} in a format of its own"
    fixed = _fixed_names(model)
    for name in sorted(known - set(stored)):
        if name in fixed or _matches(name, model._keys_to_ignore_on_load_missing):
            return f"lacks {name}"  # and transformers knows its values
    return None


def _load_whole(options: ModelConfig, spec: ModelSpec, reason: str) -> InitialWeights:
    weights, own_head = load_pretrained(options, spec)
    note = (
        f"model.name: {options.name} {reason}, so transformers loads it: that takes the whole "
        "model in rank 0's memory"
    )
    return InitialWeights(weights, own_head, note)


def load_pretrained(options: ModelConfig, spec: ModelSpec) -> tuple[StateDict, bool]:
    """Float32 weights of a folder or Hub id on the CPU, and whether the head is its own.

    Raises:
        UserError: no weights there, or their shapes differ from the configuration's.
    """
    from transformers import AutoModelForSeq2SeqLM

    assert options.name is not None
    try:
        model, report = AutoModelForSeq2SeqLM.from_pretrained(
            options.name,
            revision=options.revision,
            config=spec.config,
            dtype=torch.float32,  # files in bf16 would otherwise stay bf16
            output_loading_info=True,
        )
    except (OSError, ValueError) as error:
        raise unreadable_name(options.name, error) from None
    except (SafetensorError, pickle.UnpicklingError, EOFError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"model.name: {options.name}: the weights are damaged ({reason}); fetch them again"
        ) from None
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(
            f"the weights of model.name: {options.name} do not fit its configuration; remove "
            f"values from model.config that change shapes ({reason})"
        ) from None
    missing = set(report.get("missing_keys", ())) | {
        str(key) for key in report.get("mismatched_keys", ())
    }
    # from_pretrained forgets which these are; beside an adapter everything is frozen.
    missing -= _fixed_names(build_on_meta(spec.without_adapter()))
    if missing:
        raise UserError(
            f"the weights of model.name: {options.name} lack or misfit {len(missing)} tensors, "
            f"e.g. {sorted(missing)[0]}; check model.config and the folder"
        )
    return unique_state_dict(model), has_own_head(model)


def _without_ignored(
    stored: dict[str, StoredTensor], model: PreTrainedModel
) -> dict[str, StoredTensor]:
    """Without what transformers says old files may hold beside the model's own tensors."""
    ignored = model._keys_to_ignore_on_load_unexpected
    return {name: tensor for name, tensor in stored.items() if not _matches(name, ignored)}


def _fixed_names(model: PreTrainedModel) -> set[str]:
    """Parameters that are never trained: Pegasus' positions, which its files on the Hub lack."""
    return {name for name, parameter in model.named_parameters() if not parameter.requires_grad}


def _matches(name: str, patterns: Iterable[str] | None) -> bool:
    # What transformers declares for its own loading; it has no public name.
    return any(re.search(pattern, name) for pattern in patterns or ())


def _find_files(name: str, revision: str | None) -> list[Path]:
    """The safetensors files of a folder or, fetched or from the cache, of a Hub id; [] if none.

    Raises:
        UserError: an index that is damaged or names files that are not there.
    """
    if single := _find(name, _FILE, revision):
        return [single]
    index = _find(name, _INDEX, revision)
    if index is None:
        return []
    try:
        content: Any = json.loads(index.read_text(encoding="utf-8"))
        parts = sorted({str(part) for part in content["weight_map"].values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"model.name: {name}: {_INDEX} is damaged ({error}); fetch it again"
        ) from None
    files = []
    for part in parts:
        path = _find(name, part, revision)
        if path is None:
            raise UserError(
                f"model.name: {name}: {part}, which {_INDEX} names, is missing; fetch it again"
            )
        files.append(path)
    return files


def _find(name: str, file: str, revision: str | None) -> Path | None:
    from transformers.utils import cached_file

    if Path(name).is_dir():
        path = Path(name) / file
        return path if path.is_file() else None
    try:
        found = cached_file(name, file, revision=revision)
    except (OSError, ValueError):  # not there, or no network: transformers says which
        return None
    return Path(found) if found else None
