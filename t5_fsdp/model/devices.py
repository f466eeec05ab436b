"""What devices can do at most: dense bf16 matrix products, from the makers' data sheets."""

from __future__ import annotations

import re

# Name part as torch reports it -> FLOP a second; the first match counts, so H100 PCIe before H100.
_PEAK_BF16_FLOPS: tuple[tuple[str, float], ...] = (
    ("H200", 989e12),
    ("H100 PCIe", 756e12),
    ("H100", 989e12),
    ("A100", 312e12),
    ("A10G", 70e12),
    ("L4", 121e12),
)
# float32 products run in TF32 at half the bf16 rate only when asked to; without, at these rates.
_PEAK_FP32_FLOPS: tuple[tuple[str, float], ...] = (
    ("H200", 67e12),
    ("H100 PCIe", 51e12),
    ("H100", 67e12),
    ("A100", 19.5e12),
    ("A10G", 31e12),
    ("L4", 30e12),
)


def peak_flops(device_name: str, param_dtype: str) -> float | None:
    """FLOP a second of one device, or None where it is unknown (a CPU, a newer GPU).

    Args:
        device_name: as `torch.cuda.get_device_name` gives it.
        param_dtype: "bf16", "fp16" or "fp32".
    """
    table = _PEAK_FP32_FLOPS if param_dtype == "fp32" else _PEAK_BF16_FLOPS
    # Whole words: an L40S is no L4.
    return next((f for part, f in table if re.search(rf"\b{part}\b", device_name)), None)
