"""What a program has set in its process: not heeded by a call of the library, and there after it.

A training inside of `torch.no_grad()`, or with another default dtype, would learn nothing or
compute something else; a program that goes on must find its random numbers where they were.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
from collections.abc import Iterator

import numpy as np

from t5_fsdp.distributed import CPU_KERNEL_CACHES

# What we set; imported libraries set others, which they may need later on.
_ENVIRONMENT = tuple(CPU_KERNEL_CACHES)


@contextlib.contextmanager
def caller_state_kept() -> Iterator[None]:
    """Inside torch is as in a fresh process; afterwards everything is as the caller had it."""
    with _neutral_torch(), _random_numbers_kept(), _process_kept():
        yield


@contextlib.contextmanager
def _neutral_torch() -> Iterator[None]:
    """float32, gradients, no autocast, the CPU where no device is named."""
    import torch

    dtype = torch.get_default_dtype()
    products = torch.backends.cuda.matmul.fp32_precision
    with contextlib.ExitStack() as stack:
        stack.callback(torch.set_default_dtype, dtype)
        torch.set_default_dtype(torch.float32)
        stack.callback(setattr, torch.backends.cuda.matmul, "fp32_precision", products)
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        # Such a context costs a little at each call of torch, so only where there is one already.
        if torch.get_default_device() != torch.device("cpu"):
            stack.enter_context(torch.device("cpu"))
        yield


@contextlib.contextmanager
def _random_numbers_kept() -> Iterator[None]:
    import torch

    numbers, arrays, tensors = random.getstate(), np.random.get_state(), torch.get_rng_state()
    has_cuda = torch.cuda.is_initialized()
    on_gpus = torch.cuda.get_rng_state_all() if has_cuda else []
    device = torch.cuda.current_device() if has_cuda else None
    try:
        yield
    finally:
        random.setstate(numbers)
        np.random.set_state(arrays)
        torch.set_rng_state(tensors)
        if device is not None:
            torch.cuda.set_rng_state_all(on_gpus)
            torch.cuda.set_device(device)
        elif torch.cuda.is_initialized():  # the caller's seed has not come there yet
            torch.cuda.manual_seed_all(torch.initial_seed())


@contextlib.contextmanager
def _process_kept() -> Iterator[None]:
    hook = sys.excepthook  # each process group puts one of its own before the last
    before = {name: os.environ.get(name) for name in _ENVIRONMENT}
    try:
        yield
    finally:
        sys.excepthook = hook
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
