"""What a device makes of the configured precision."""

from __future__ import annotations

import torch

from t5_fsdp.config import ParallelConfig


def use_tf32(enabled: bool, device: torch.device) -> None:
    """Compute float32 matrix products of this process in TF32, or not; on a CPU nothing changes.

    TF32 has float32's range and 10 bits of mantissa instead of 23.
    """
    if device.type == "cuda":
        torch.backends.cuda.matmul.fp32_precision = "tf32" if enabled else "ieee"


def precision_warnings(options: ParallelConfig, device: torch.device) -> list[str]:
    """What a user should know of the configured dtype, one line each."""
    native = True
    name = "CPU"
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    warnings = [fp16_warning(options), emulated_bf16_warning(options, name, native)]
    return [warning for warning in warnings if warning is not None]


def fp16_warning(options: ParallelConfig) -> str | None:
    """T5 was trained in bf16, whose range is float32's."""
    if options.param_dtype != "fp16":
        return None
    return (
        "parallel.param_dtype is fp16, which ends at 65,504: the outputs of pretrained T5s' "
        "feed-forward layers overflow it, and the loss with them; set it to bf16 where the device "
        "can, else to fp32"
    )


def emulated_bf16_warning(options: ParallelConfig, name: str, native: bool) -> str | None:
    """Of a GPU without bf16 units, i.e. of a compute capability below 8.0.

    Args:
        name: the device's.
        native: whether it computes bf16 itself.
    """
    if native or options.param_dtype != "bf16":
        return None
    return (
        f"{name} has no bf16 of its own and emulates it slowly; set parallel.param_dtype: fp32, or "
        "fp16 for a model that stands it"
    )
