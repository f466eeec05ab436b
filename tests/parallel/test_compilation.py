"""Compiled blocks: the same numbers, clean names, and few compilations whatever the shapes."""

from __future__ import annotations

import shutil
from typing import Any

import numpy as np
import pytest
import torch

from t5_fsdp.config import ParallelConfig
from tests.model.test_attention import build
from tests.parallel.test_engines import plain, train


def compiled(parallel: dict[str, Any]) -> tuple[Any, int]:
    """On a rank of the pool: as `train`, and the graphs that were compiled."""
    from t5_fsdp.parallel.compilation import num_compilations

    torch.compiler.reset()  # the rank has graphs of the tests before
    before = num_compilations()
    found = train({"compile": True, **parallel}, False, "adamw")
    return found, num_compilations() - before


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(
            {"engine": engine, "activation_checkpointing": checkpointing, "compile_backend": name},
            marks=mark,
        )
        for engine, checkpointing, name, mark in (
            # Captured, guarded and counted as always, but run as it is: a third of the time.
            ("fsdp2", "selective", "eager", pytest.mark.long),
            ("fsdp2", "selective", "aot_eager", pytest.mark.exhaustive),
            ("fsdp1", "none", "aot_eager", pytest.mark.exhaustive),
            ("fsdp2", "full", "aot_eager", pytest.mark.exhaustive),
            ("ddp", "full", "aot_eager", pytest.mark.exhaustive),
        )
    ],
    ids=str,
)
def test_compiled_blocks_equal_plain_pytorch(pools: Any, options: dict[str, Any]) -> None:
    from t5_fsdp.parallel.compilation import MOST_GRAPHS

    losses, norms, weights = plain(False, "adamw")
    for (found_losses, found_norms, found_weights, _), count in pools(2).run(compiled, options):
        assert found_losses == pytest.approx(losses, rel=1e-5)
        assert found_norms == pytest.approx(norms, rel=1e-4)
        assert found_weights.keys() == weights.keys()
        # Micro-batches of three rows and of one, in training and in validation.
        assert 0 < count <= MOST_GRAPHS


def test_few_compilations_whatever_the_shapes() -> None:
    from t5_fsdp.data.collation import SpecialIds, collate
    from t5_fsdp.model.forward import attach_loss
    from t5_fsdp.model.loss import LossOptions
    from t5_fsdp.parallel import compilation

    plain_model, model = build("t5", "sdpa"), build("t5", "sdpa")
    for each in (plain_model, model):
        attach_loss(each, LossOptions())
    names = [name for name, _ in model.named_parameters()]
    options = ParallelConfig(compile=True, compile_backend="aot_eager")
    compilation.apply(model, options)
    assert [name for name, _ in model.named_parameters()] == names
    before = compilation.num_compilations()
    rng = np.random.default_rng(0)
    for rows, source, target in [(3, 9, 5), (2, 17, 4), (5, 30, 8)]:
        micro = collate(
            [rng.integers(2, 101, source) for _ in range(rows)],
            [rng.integers(2, 101, target) for _ in range(rows)],
            SpecialIds(0, 0),
        )
        gradients = []
        for each in (plain_model, model):
            loss, _ = each(**micro.loss_inputs())
            each.zero_grad()
            loss.backward()
            gradients.append([p.grad for p in each.parameters()])
        torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-4)
    # The first block of a stack and the others, in the encoder and the decoder.
    assert compilation.num_compilations() - before == 4


def test_a_missing_compiler_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from t5_fsdp.parallel.compilation import compilation_problem

    cpu = torch.device("cpu")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    problem = compilation_problem(ParallelConfig(compile=True), cpu)
    assert problem is not None and "C++ compiler" in problem
    for fine in (
        compilation_problem(ParallelConfig(compile=True), torch.device("cuda")),
        compilation_problem(ParallelConfig(compile=True, compile_backend="aot_eager"), cpu),
        compilation_problem(ParallelConfig(), cpu),
    ):
        assert fine is None
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/" + name)
    assert compilation_problem(ParallelConfig(compile=True), cpu) is None
