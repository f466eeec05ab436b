"""What devices can do at most, from the makers' data sheets, and what memory is free on one."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# Name part as torch reports it -> FLOP a second in bf16 and fp16, dense; the first match counts, so
# H100 PCIe before H100.
_PEAK_16_BIT_FLOPS: tuple[tuple[str, float], ...] = (
    ("H200", 989e12),
    ("H100 PCIe", 756e12),
    ("H100", 989e12),
    ("A100", 312e12),
    ("A10G", 70e12),
    ("L4", 121e12),
    ("V100-PCIE", 112e12),
    ("V100", 125e12),
    ("T4", 65e12),
)
# Of compute capability 7: tensor cores for fp16 alone. bf16 is float32 arithmetic there, at best.
_WITHOUT_BF16 = ("V100", "T4")
# float32 products without TF32. With it they run at half the bf16 rate on all that have bf16.
_PEAK_FP32_FLOPS: tuple[tuple[str, float], ...] = (
    ("H200", 67e12),
    ("H100 PCIe", 51e12),
    ("H100", 67e12),
    ("A100", 19.5e12),
    ("A10G", 35e12),
    ("L4", 30e12),
    ("V100-PCIE", 14e12),
    ("V100", 15.7e12),
    ("T4", 8.1e12),
)


@dataclass(frozen=True)
class Device:
    """A device and the machine that it is rented in, for plans.

    Attributes:
        name: as `torch.cuda.get_device_name` gives it, for `peak_flops`.
        memory_bytes: what PyTorch can address.
        memory_bandwidth: bytes a second of its memory.
        link_bandwidth: bytes a second that it sends, or receives, within a node at most.
        node_bandwidth: bytes a second between nodes, of all its devices together.
        node: the machine whose network that is, with 8 devices.
    """

    name: str
    memory_bytes: int
    memory_bandwidth: float
    link_bandwidth: float
    node_bandwidth: float
    node: str


# Memory as nvidia-smi tells it; bandwidths from NVIDIA's data sheets (NVLink 2: 300 GB/s both ways,
# NVLink 3: 600, NVLink 4: 900; PCIe 3 x16: 32, PCIe 4: 64; L4, A10G and T4 have no NVLink),
# networks from AWS' instance pages (EFA: P4 400 Gb/s, P5 3,200; P3 25, P3dn, G4dn, G5, G6 100).
DEVICES: dict[str, Device] = {
    "a100-40": Device("A100-SXM4-40GB", 40_536 * 2**20, 1.555e12, 300e9, 50e9, "p4d.24xlarge"),
    "a100-80": Device("A100-SXM4-80GB", 81_920 * 2**20, 2.039e12, 300e9, 50e9, "p4de.24xlarge"),
    "h100": Device("H100 SXM", 81_559 * 2**20, 3.35e12, 450e9, 400e9, "p5.48xlarge"),
    "h200": Device("H200", 143_771 * 2**20, 4.8e12, 450e9, 400e9, "p5en.48xlarge"),
    "l4": Device("L4", 23_034 * 2**20, 0.3e12, 32e9, 12.5e9, "g6.48xlarge"),
    "a10g": Device("A10G", 23_028 * 2**20, 0.6e12, 32e9, 12.5e9, "g5.48xlarge"),
    "v100-16": Device("V100-SXM2-16GB", 16_160 * 2**20, 0.9e12, 150e9, 3.125e9, "p3.16xlarge"),
    "v100-32": Device("V100-SXM2-32GB", 32_510 * 2**20, 0.9e12, 150e9, 12.5e9, "p3dn.24xlarge"),
    "t4": Device("T4", 15_109 * 2**20, 0.32e12, 16e9, 12.5e9, "g4dn.metal"),
}


def peak_flops(device_name: str, param_dtype: str, tf32: bool = False) -> float | None:
    """FLOP a second of one device, or None where it is unknown (a CPU, a newer GPU).

    Args:
        device_name: as `torch.cuda.get_device_name` gives it.
        param_dtype: "bf16", "fp16" or "fp32".
        tf32: whether float32 products run in TF32.
    """
    is_fp32 = param_dtype == "fp32"
    if not has_bf16(device_name):
        is_fp32, tf32 = param_dtype != "fp16", False
    if is_fp32 and not tf32:
        return _find(_PEAK_FP32_FLOPS, device_name)
    peak = _find(_PEAK_16_BIT_FLOPS, device_name)
    return peak if peak is None or not is_fp32 else 0.5 * peak


def has_bf16(device_name: str) -> bool:
    """Whether it computes bf16, and TF32, itself; of a device that is not known here, yes."""
    return not any(_is_named(part, device_name) for part in _WITHOUT_BF16)


def _find(table: tuple[tuple[str, float], ...], device_name: str) -> float | None:
    return next((flops for part, flops in table if _is_named(part, device_name)), None)


def _is_named(part: str, device_name: str) -> bool:
    # Whole words: an L40S is no L4.
    return re.search(rf"\b{part}\b", device_name) is not None


def free_memory_bytes(device: torch.device, processes_on_node: int) -> int | None:
    """Memory that this process may still take, or None where the system does not tell.

    Args:
        device: a GPU, whose freed but still reserved memory counts as free; or the CPU.
        processes_on_node: they share the host's memory.
    """
    import torch

    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:  # not on Linux
        return None
    available = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), None)
    return None if available is None else 1024 * int(available) // processes_on_node
