"""Random numbers as pure functions of (seed, purpose, place), so that nothing random needs saving.

Dropout is seeded anew at each optimizer step from (seed, step, rank): a resumed run draws what the
unbroken one would have drawn, and evaluation in between cannot disturb it.
"""

from __future__ import annotations

import hashlib

import numpy as np


def derive_seed(seed: int, *parts: int | str) -> int:
    """A 63-bit seed for one purpose, e.g. `derive_seed(1, "dropout", step, rank)`.

    Hashing keeps streams of neighbouring seeds and steps apart, which `seed + step` would not.
    """
    text = "\0".join(str(part) for part in (seed, *parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def numpy_generator(seed: int, *parts: int | str) -> np.random.Generator:
    """A generator of its own for one purpose; PCG64, so its stream is the same on every machine."""
    return np.random.Generator(np.random.PCG64(derive_seed(seed, *parts)))


def seed_torch(seed: int, *parts: int | str) -> None:
    """Seed torch's generators on all devices for one purpose."""
    import torch

    torch.manual_seed(derive_seed(seed, *parts))
