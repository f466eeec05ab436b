"""In which dtype a module computes where autocast may decide."""

from __future__ import annotations

import torch


def compute_dtype(states: torch.Tensor) -> torch.dtype:
    """autocast's dtype where it is on for the device of `states` (under DDP), else theirs."""
    kind = states.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return states.dtype
