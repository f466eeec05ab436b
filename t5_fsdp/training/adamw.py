"""AdamW whose moments are kept in bfloat16: half the bytes, by stochastic rounding."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from t5_fsdp.parallel.common import local_part
from t5_fsdp.seeding import derive_seed
from t5_fsdp.training.skipping import assign, count_step

_MOMENTS = ("exp_avg", "exp_avg_sq")  # torch.optim.AdamW's names, so that checkpoints are alike


class LowPrecisionMomentsAdamW(torch.optim.Optimizer):
    """The update rule of torch.optim.AdamW in float32, with moments stored in another dtype.

    torch's own AdamW keeps moments in the parameter's dtype. Rounding them to the nearest bfloat16
    would freeze the second one: a step changes it by 0.001 of its size, and bfloat16 resolves
    0.004. Rounding up or down at random, in proportion to the distances, is right in the mean.

    The random bits are a function of (seed, parameter, number, shard), so a resumed run that goes
    on with the same number rounds as the unbroken one would have, and dropout's generator is not
    touched. Works on plain tensors, DTensors and FSDP1's flat pieces.

    Args:
        params: parameters or groups of them, float32.
        lr: learning rate.
        seed: of the rounding.
        shard: which shard of the model this rank holds. Ranks that hold the same one must agree:
            their copies would drift apart.
        moments_dtype: float32 rounds nothing, and equals torch.optim.AdamW.

    Attributes:
        number: of the next call of `step`; each counts on by itself.
        found_inf: as torch's fused AdamW has it: where a tensor of 1, `step` changes nothing.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        *,
        seed: int,
        shard: int,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        moments_dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )
        self._seed, self._shard, self._moments_dtype = seed, shard, moments_dtype
        self._generators: dict[torch.device, torch.Generator] = {}
        self.number = 1
        self.found_inf: torch.Tensor | None = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        if closure is not None:  # of torch's protocol: it computes the gradients
            with torch.enable_grad():
                closure()
        index = -1
        for group in self.param_groups:
            for parameter in group["params"]:
                index += 1
                if parameter.grad is not None:
                    self._update(index, parameter, group)
        self.number += 1

    def _update(self, index: int, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        assert parameter.grad is not None
        weight, gradient = local_part(parameter), local_part(parameter.grad)
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), device=weight.device)
            for name in _MOMENTS:
                state[name] = torch.zeros_like(parameter, dtype=self._moments_dtype)
        count_step(state["step"], self.found_inf)
        kept = [local_part(state[name]) for name in _MOMENTS]
        beta1, beta2 = group["betas"]
        mean = kept[0].float().lerp(gradient, 1 - beta1)
        square = (kept[1].float() * beta2).addcmul_(gradient, gradient, value=1 - beta2)
        steps = state["step"].double()  # 1 - 0.999 would be off by 6e-5 in float32
        deviation = (square.sqrt() / (1 - beta2**steps).sqrt()).add_(group["eps"])
        change = (mean / deviation).mul_(group["lr"] / (1 - beta1**steps))
        changed = change.neg_().add_(weight, alpha=1 - group["lr"] * group["weight_decay"])
        assign(weight, changed, self.found_inf)
        generator = self._generator(weight.device)
        generator.manual_seed(derive_seed(self._seed, "moments", index, self.number, self._shard))
        for stored, exact in zip(kept, (mean, square), strict=True):
            is_exact = stored.dtype == exact.dtype
            rounded = exact if is_exact else stochastic_round(exact, generator)
            assign(stored, rounded, self.found_inf)

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            self._generators[device] = torch.Generator(device)
        return self._generators[device]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, which casts every state to the parameter's dtype; moments go back to theirs.

        Those of another dtype in `state_dict` are converted.
        """
        super().load_state_dict(state_dict)
        # Where nobody else sets it, the number goes on as well.
        self.number = 1 + max((int(state["step"]) for state in self.state.values()), default=0)
        for parameter, state in self.state.items():
            state["step"] = state["step"].to(parameter.device)
            for name in _MOMENTS:
                state[name] = state[name].to(self._moments_dtype)


def stochastic_round(values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """float32 rounded to one of the two nearest bfloat16 numbers, in the mean to itself.

    bfloat16 is the upper half of a float32. Adding a uniform number to the lower half carries into
    the upper one with the probability that the lower half is of a whole unit.

    Args:
        values: float32, finite.
        generator: on the device of `values`.

    Returns:
        bfloat16, of the same shape; what bfloat16 can hold is kept as it is.
    """
    noise = torch.empty_like(values, dtype=torch.int32).random_(0, 1 << 16, generator=generator)
    upper = (values.view(torch.int32) + noise).bitwise_and_(-(1 << 16))
    return upper.view(torch.float32).bfloat16()
