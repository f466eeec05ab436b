"""The loss and its gradients against torch's cross-entropy over whole logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from t5_fsdp.data.collation import IGNORED_LABEL, SpecialIds, collate
from t5_fsdp.model import loss as loss_module
from t5_fsdp.model.forward import attach_loss
from t5_fsdp.model.loss import LossOptions, target_loss
from tests.model.test_attention import FAMILIES, build

VOCAB, WIDTH, TARGETS = 101, 16, 23


def tensors(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(4)
    states = torch.randn(TARGETS, WIDTH, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(VOCAB, WIDTH, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(0, VOCAB, (TARGETS,), generator=generator)
    return states, weight, targets


def plain(
    states: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, smoothing: float, z: float
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = F.linear(states, weight).float()
    objective = F.cross_entropy(logits, targets, reduction="sum", label_smoothing=smoothing)
    objective = objective + z * logits.logsumexp(-1).square().sum()
    return objective, F.cross_entropy(logits, targets, reduction="sum")


@pytest.mark.parametrize("chunk_rows", [None, 1, 5, 23, 100])
@pytest.mark.parametrize(("smoothing", "z"), [(0.0, 0.0), (0.1, 0.0), (0.0, 1e-2), (0.2, 1e-2)])
def test_loss_and_gradients_equal_torch(chunk_rows: int | None, smoothing: float, z: float) -> None:
    expected = tensors()
    objective, cross_entropy = plain(*expected, smoothing, z)
    (3.0 * objective).backward()
    found = tensors()
    ours, our_cross_entropy = target_loss(*found, LossOptions(smoothing, z, chunk_rows))
    (3.0 * ours).backward()
    torch.testing.assert_close(ours, objective, rtol=1e-6, atol=0)
    torch.testing.assert_close(our_cross_entropy, cross_entropy, rtol=1e-6, atol=0)
    assert not our_cross_entropy.requires_grad
    for mine, theirs in zip(found[:2], expected[:2], strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=1e-5)


def test_many_chunks_in_bf16_stay_near_float32() -> None:
    exact = tensors()
    plain(*exact, 0.0, 0.0)[0].backward()
    found = tensors(torch.bfloat16)
    loss, _ = target_loss(*found, LossOptions(chunk_rows=1))
    loss.backward()
    assert loss.dtype == torch.float32
    for mine, theirs in zip(found[:2], exact[:2], strict=True):
        assert mine.grad is not None and theirs.grad is not None
        assert mine.grad.dtype == torch.bfloat16
        error = (mine.grad.float() - theirs.grad).norm() / theirs.grad.norm()
        assert error < 0.02


def test_the_factor_of_the_gradient_is_not_rounded() -> None:
    states, weight, targets = tensors(torch.bfloat16)
    factor = 343 / 512  # in the middle between two numbers of bf16
    gradients = []
    for each in (1.0, factor):
        loss, _ = target_loss(states, weight, targets, LossOptions())
        [gradient] = torch.autograd.grad(each * loss, [weight])
        gradients.append(gradient.float().norm())
    # Rounding the values one by one averages out; a rounded factor is 0.3 % off for all.
    assert float(gradients[1] / gradients[0]) == pytest.approx(factor, rel=1e-3)


def test_no_targets_are_a_loss_of_zero_with_gradients_of_zero() -> None:
    states, weight, targets = tensors()
    loss, cross_entropy = target_loss(states[:0], weight, targets[:0], LossOptions(0.1, 1e-3))
    loss.backward()
    assert loss.item() == cross_entropy.item() == 0.0
    assert states.grad is not None and weight.grad is not None
    assert not states.grad.any() and not weight.grad.any()


def test_a_frozen_head_gets_no_gradient() -> None:
    states, weight, targets = tensors()
    weight.requires_grad_(False)
    target_loss(states, weight, targets, LossOptions(chunk_rows=4))[0].backward()
    assert weight.grad is None and states.grad is not None


def test_without_gradients_none_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    chunk = loss_module._chunk

    def record(*args: Any) -> Any:
        made.append(args[-1])
        return chunk(*args)

    monkeypatch.setattr(loss_module, "_chunk", record)
    states, weight, targets = tensors()
    with torch.no_grad():
        target_loss(states, weight, targets, LossOptions())
    target_loss(states, weight, targets, LossOptions())
    assert made == [False, True]


def test_a_bias_is_added_to_the_logits() -> None:
    states, weight, targets = tensors()
    bias = torch.linspace(-2, 2, VOCAB)
    loss, _ = target_loss(states, weight, targets, LossOptions(chunk_rows=6), bias)
    expected = F.cross_entropy(F.linear(states, weight) + bias, targets, reduction="sum")
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)


def test_no_tensor_of_all_logits_exists() -> None:
    """mT5's vocabulary, 8 x 150 targets: 1.2 GB of float32 logits, several times over in torch."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                Largest.elements = max(Largest.elements, result.numel())
            return result

    vocab, width, count = 250112, 8, 150
    states = torch.zeros(count, width, requires_grad=True)
    weight = torch.zeros(vocab, width, requires_grad=True)
    targets = torch.zeros(count, dtype=torch.int64)
    with Largest():
        target_loss(states, weight, targets, LossOptions(chunk_rows=16))[0].backward()
    assert Largest.elements <= max(16 * vocab, vocab * width)
    assert LossOptions().rows_at_a_time(vocab) * vocab * 4 <= 1 << 28


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_with_the_loss_equals_its_logits(family: str) -> None:
    generator = torch.Generator().manual_seed(6)
    rows = [torch.randint(2, VOCAB, (n,), generator=generator).numpy() for n in (9, 4, 5, 1)]
    micro = collate(rows[:2], rows[2:], SpecialIds(0, 0))
    model = build(family, "eager")
    logits = model(**micro.inputs()).logits
    expected = F.cross_entropy(
        logits.flatten(0, 1), micro.labels.flatten(), ignore_index=IGNORED_LABEL, reduction="sum"
    )
    attach_loss(model, LossOptions(chunk_rows=2))
    objective, cross_entropy = model(**micro.loss_inputs())
    torch.testing.assert_close(objective, expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(cross_entropy, expected.detach(), rtol=1e-5, atol=0)
    torch.testing.assert_close(model(**micro.inputs()).logits, logits)
