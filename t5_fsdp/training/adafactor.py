"""Adafactor in T5's recipe, for matrices that are whole or sharded by rows.

torch.optim.Adafactor fails on the DTensors of fully_shard (torch 2.13), and it is another recipe:
it holds the rate below 1/sqrt(step) and puts its epsilon elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from t5_fsdp.parallel.common import local_part
from t5_fsdp.training.skipping import assign, count_step

_DECAY_EXPONENT = 0.8
_EPSILON_SQUARE = 1e-30  # added to squared gradients
_EPSILON_SCALE = 1e-3  # a parameter's smallest scale
_CLIPPING_THRESHOLD = 1.0
_MIN_DIM_TO_FACTOR = 128


class Adafactor(torch.optim.Optimizer):
    """Adafactor (Shazeer and Stern 2018, algorithm 4) as T5 was trained with.

    The second moment of a matrix is kept as the means of its rows and columns, that of anything
    else in full; there is no first moment. With g the gradient and t the step (from 1):

        b = 1 - t ** -0.8
        row, column = moving averages, by b, of the means of g ** 2 + 1e-30 over columns, rows
        u = g / sqrt(row * column / mean(row)), divided by max(1, RMS(u))
        weight -= lr * max(1e-3, RMS(weight)) * u

    These are T5X's defaults. Weight decay is decoupled, as in AdamW: lr * weight_decay * weight is
    taken off first. Means and RMS are those of the whole matrix, so that sharding changes nothing:
    two all-reduces a step, of one value a column and two a parameter. A matrix in pieces that
    cross its rows (FSDP1's flat ones) cannot be factored.

    Args:
        params: parameters or groups of them, float32; DTensors sharded by dimension 0 at most.
        lr: relative to a parameter's RMS; T5 was fine-tuned with a constant 1e-3.
        weight_decay: see above.
        min_dim_to_factor: a matrix with a smaller dimension is kept in full (T5X: 128).

    Attributes:
        found_inf: as torch's fused AdamW has it: where a tensor of 1, `step` changes nothing.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        *,
        weight_decay: float = 0.0,
        min_dim_to_factor: int = _MIN_DIM_TO_FACTOR,
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self._min_dim_to_factor = min_dim_to_factor
        self.found_inf: torch.Tensor | None = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient; a collective of those that share shards."""
        if closure is not None:  # of torch's protocol: it computes the gradients
            with torch.enable_grad():
                closure()
        pieces = [
            self._piece(parameter, group)
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        groups = [piece.process_group for piece in pieces]
        sums = _sum_over_shards([piece.sums() for piece in pieces], groups)
        for piece, (squares, columns) in zip(pieces, sums, strict=True):
            piece.advance(squares, columns)
        sums = _sum_over_shards([[piece.update().square().sum()] for piece in pieces], groups)
        for piece, [squares] in zip(pieces, sums, strict=True):
            piece.apply(squares)

    def _piece(self, parameter: torch.Tensor, group: dict[str, Any]) -> _Piece:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), device=parameter.device)
            if is_factored(parameter.shape, self._min_dim_to_factor):
                state["row"] = _rows_like(parameter)
                state["column"] = local_part(parameter).new_zeros(parameter.shape[1])
            else:
                state["square"] = torch.zeros_like(parameter)
        return _Piece(parameter, state, group["lr"], group["weight_decay"], self.found_inf)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's; counts of steps go where their parameter is."""
        super().load_state_dict(state_dict)
        for parameter, state in self.state.items():
            state["step"] = state["step"].to(parameter.device)


def is_factored(shape: Sequence[int], min_dim_to_factor: int = _MIN_DIM_TO_FACTOR) -> bool:
    """Whether only the means of rows and columns are kept of a parameter's second moment."""
    return len(shape) == 2 and min(shape) >= min_dim_to_factor


@dataclass
class _Piece:
    """This rank's rows of one parameter, in the course of a step.

    Attributes:
        parameter: float32, [rows, columns] or of another shape; plain or sharded.
        state: step; row [rows] and column [columns], or square as the parameter.
        is_skipped: 1 where the step changes nothing, else 0; None: it does.
        scale: max(1e-3, RMS(weight)), a scalar tensor, from `advance` on.
    """

    parameter: torch.Tensor
    state: dict[str, Any]
    lr: float
    weight_decay: float
    is_skipped: torch.Tensor | None
    scale: torch.Tensor | None = None

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold the other rows, or None where this rank holds them all."""
        if not isinstance(self.parameter, DTensor):
            return None
        placements = self.parameter.placements
        sharded = [dim for dim, placement in enumerate(placements) if placement.is_shard()]
        assert [placements[dim] for dim in sharded] in ([], [Shard(0)]), placements
        return self.parameter.device_mesh.get_group(sharded[0]) if sharded else None

    @property
    def _weight(self) -> torch.Tensor:
        return local_part(self.parameter)

    @property
    def _gradient(self) -> torch.Tensor:
        assert self.parameter.grad is not None
        return local_part(self.parameter.grad)

    def sums(self) -> list[torch.Tensor]:
        """Of squares: the weights' over all entries, the gradient's over the rows [columns]."""
        columns = self._gradient.new_zeros(0)
        if "row" in self.state:
            columns = self._gradient.square().sum(0)
        return [self._weight.square().sum(), columns]

    def advance(self, squares: torch.Tensor, columns: torch.Tensor) -> None:
        """Moving averages and scale of this step, from the whole parameter's `sums`."""
        count_step(self.state["step"], self.is_skipped)
        size = self.parameter.numel()
        self.scale = (squares / size).sqrt().clamp_(min=_EPSILON_SCALE)
        square = self._gradient.square().add_(_EPSILON_SQUARE)
        if "row" in self.state:
            self._average("row", square.mean(1))
            self._average("column", columns / self.parameter.shape[0] + _EPSILON_SQUARE)
        else:
            self._average("square", square)

    def _average(self, name: str, value: torch.Tensor) -> None:
        held = local_part(self.state[name])
        averaged = held.lerp(value, self.state["step"] ** -_DECAY_EXPONENT)
        assign(held, averaged, self.is_skipped)

    def update(self) -> torch.Tensor:
        """This rank's rows of the gradient over the root of its second moment.

        Computed twice in a step: keeping it would take as much memory as the weights.
        """
        if "row" not in self.state:
            return self._gradient * local_part(self.state["square"]).rsqrt()
        column = self.state["column"]
        # The mean of the rows' means, of which this rank has a part only, is that of the columns'.
        row = (local_part(self.state["row"]) / column.mean()).rsqrt_()
        return (self._gradient * row.unsqueeze(1)).mul_(column.rsqrt())

    def apply(self, squares: torch.Tensor) -> None:
        """Change the weights, given the sum of squares of the whole `update`."""
        assert self.scale is not None
        rms = (squares / self.parameter.numel()).sqrt()
        clipping = (rms / _CLIPPING_THRESHOLD).clamp_(min=1.0)
        change = self.update().mul_(self.lr * self.scale / clipping)
        changed = change.neg_().add_(self._weight, alpha=1 - self.lr * self.weight_decay)
        assign(self._weight, changed, self.is_skipped)


def _rows_like(parameter: torch.Tensor) -> torch.Tensor:
    """Zeros, one a row, sharded as the rows are."""
    local = local_part(parameter)
    zeros = local.new_zeros(local.shape[0])
    if not isinstance(parameter, DTensor):
        return zeros
    return DTensor.from_local(
        zeros,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape[:1],
        stride=(1,),
    )


def _sum_over_shards(
    values: list[list[torch.Tensor]], groups: list[dist.ProcessGroup | None]
) -> list[list[torch.Tensor]]:
    """Each tensor summed over its group's ranks, with one all-reduce a group."""
    flat = [value for row in values for value in row]
    owners = [group for row, group in zip(values, groups, strict=True) for _ in row]
    summed = list(flat)
    for group in dict.fromkeys(owner for owner in owners if owner is not None):
        places = [place for place, owner in enumerate(owners) if owner is group]
        buffer = torch.cat([flat[place].reshape(-1) for place in places])
        dist.all_reduce(buffer, group=group)
        parts = buffer.split([flat[place].numel() for place in places])
        for place, part in zip(places, parts, strict=True):
            summed[place] = part.view_as(flat[place])
    remaining = iter(summed)
    return [[next(remaining) for _ in row] for row in values]
