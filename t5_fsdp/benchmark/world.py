"""The world of ranks that a contestant computes in."""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Iterator

import torch

from t5_fsdp.distributed import World, enter_world, read_launch

COLLECTIVE_TIMEOUT_SECONDS = 300.0


@contextlib.contextmanager
def entered_world(device: str) -> Iterator[World]:
    """On a rank: the world with its process group up, and nothing of an earlier call in memory."""
    quiet()
    reset_memory(device)
    world = enter_world(read_launch())
    world.device = chosen_device(device, world.rank)
    world.connect(COLLECTIVE_TIMEOUT_SECONDS)
    yield world
    world.disconnect()
    reset_memory(device)


def chosen_device(device: str, rank: int) -> torch.device:
    """Where a rank computes; each has a GPU of its own."""
    if device == "cpu":
        return torch.device("cpu")
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


def reset_memory(device: str) -> None:
    """Forget what is not used any more, and the largest use so far."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def quiet() -> None:
    """Libraries' warnings and progress bars are not what is looked for here."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    warnings.filterwarnings("ignore")


def device_name(device: str) -> str:
    """Of cpu or cuda, as `model.devices.peak_flops` knows it."""
    return torch.cuda.get_device_name() if device == "cuda" else "CPU"
