"""GPUs: what PyTorch sees of them, and what they can do."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from t5_fsdp.cli.machine_checks.finding import GIB, Finding, note, ok, problem
from t5_fsdp.config import ParallelConfig

_SHARE_IN_USE = 0.05  # of a GPU's memory: said when it is more


@dataclass(frozen=True)
class Gpu:
    """One GPU."""

    name: str
    total_memory_bytes: int
    free_memory_bytes: int
    has_bf16: bool


@dataclass(frozen=True)
class GpuFacts:
    """What is known of this machine's GPUs.

    Attributes:
        driver: version of the driver, or None where nvidia-smi tells none.
        num_gpus_of_driver: GPUs that the driver has, whatever PyTorch sees.
        cuda, nccl: versions that PyTorch was built with; None in a CPU build.
        hidden_by: CUDA_VISIBLE_DEVICES, where it is set.
        num_pairs_without_access: pairs of GPUs that can't reach each other's memory.
    """

    gpus: list[Gpu] = field(default_factory=list)
    driver: str | None = None
    num_gpus_of_driver: int = 0
    cuda: str | None = None
    nccl: str | None = None
    hidden_by: str | None = None
    num_pairs_without_access: int = 0


def gather_gpu_facts() -> GpuFacts:
    """Ask PyTorch, the driver and the environment."""
    import torch

    versions = _ask_driver()
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = [_describe(torch, index) for index in range(num_gpus)]
    pairs = [(a, b) for a in range(num_gpus) for b in range(num_gpus) if a != b]
    num_without = sum(not torch.cuda.can_device_access_peer(a, b) for a, b in pairs)
    nccl = None
    if torch.version.cuda is not None:
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return GpuFacts(
        gpus=gpus,
        driver=versions[0] if versions else None,
        num_gpus_of_driver=len(versions) or len(list(Path("/dev").glob("nvidia[0-9]*"))),
        cuda=torch.version.cuda,
        nccl=nccl,
        hidden_by=os.environ.get("CUDA_VISIBLE_DEVICES"),
        num_pairs_without_access=num_without // 2,
    )


def _describe(torch: Any, index: int) -> Gpu:
    free, total = torch.cuda.mem_get_info(index)
    with torch.cuda.device(index):
        has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    return Gpu(torch.cuda.get_device_name(index), total, free, has_bf16)


def _ask_driver() -> list[str]:
    """The driver's version, once a GPU."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", timeout=20
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.split() if done.returncode == 0 else []


def judge_gpus(facts: GpuFacts, parallel: ParallelConfig) -> list[Finding]:
    """What to say about them."""
    if not facts.gpus:
        return [_judge_absence(facts)]
    names = sorted({gpu.name for gpu in facts.gpus})
    smallest_bytes = min(gpu.total_memory_bytes for gpu in facts.gpus)
    found = [
        ok(
            "GPUs",
            f"{len(facts.gpus)} x {' and '.join(names)}, {smallest_bytes / GIB:.1f} GiB; driver "
            f"{facts.driver or 'unknown'}, CUDA {facts.cuda}, NCCL {facts.nccl}",
        )
    ]
    if len(names) > 1:
        found.append(note("GPUs", "they differ: a step is as quick as the slowest of them"))
    if len(facts.gpus) < facts.num_gpus_of_driver:
        hidden = f" (CUDA_VISIBLE_DEVICES={facts.hidden_by})" if facts.hidden_by else ""
        found.append(
            note("GPUs", f"the driver has {facts.num_gpus_of_driver}, not all are visible{hidden}")
        )
    found += _judge_use(facts.gpus)
    found += _judge_bf16(facts.gpus, parallel)
    if facts.num_pairs_without_access:
        found.append(
            note(
                "peer access",
                f"{facts.num_pairs_without_access} pairs of GPUs reach each other through host "
                "memory alone, which slows sharding; `nvidia-smi topo -m` shows how they are "
                "connected",
            )
        )
    return found


def _judge_absence(facts: GpuFacts) -> Finding:
    if facts.num_gpus_of_driver == 0:
        return note("GPUs", "none; training runs on the CPU, which is for trying things out")
    if facts.hidden_by is not None:
        why = f"CUDA_VISIBLE_DEVICES is {facts.hidden_by!r}; unset it"
    elif facts.cuda is None:
        why = (
            "this PyTorch is a build for CPUs; install the one for your CUDA "
            "(pytorch.org/get-started)"
        )
    else:
        why = (
            f"driver {facts.driver or 'unknown'} may be too old for CUDA {facts.cuda}, or the "
            'container was started without `--gpus all`; `python -c "import torch; '
            'torch.zeros(1).cuda()"` says more'
        )
    return problem("GPUs", f"there are {facts.num_gpus_of_driver}, and PyTorch sees none: {why}")


def _judge_use(gpus: list[Gpu]) -> list[Finding]:
    used = {
        number: gpu.total_memory_bytes - gpu.free_memory_bytes
        for number, gpu in enumerate(gpus)
        if gpu.total_memory_bytes - gpu.free_memory_bytes > _SHARE_IN_USE * gpu.total_memory_bytes
    }
    if not used:
        return []
    what = ", ".join(
        f"GPU {number}: {size_bytes / GIB:.1f} GiB" for number, size_bytes in used.items()
    )
    return [
        problem(
            "GPU memory",
            f"in use by other processes ({what}); `nvidia-smi` names them: end them, or choose "
            "other GPUs with CUDA_VISIBLE_DEVICES",
        )
    ]


def _judge_bf16(gpus: list[Gpu], parallel: ParallelConfig) -> list[Finding]:
    if all(gpu.has_bf16 for gpu in gpus):
        return [ok("bf16", "in hardware")]
    text = "not in hardware"
    if "bf16" in (parallel.param_dtype, parallel.reduce_dtype):
        return [
            problem(
                "bf16",
                f"{text}, and parallel.param_dtype or reduce_dtype asks for it; set them to fp32 "
                "(fp16 overflows pretrained T5s)",
            )
        ]
    return [note("bf16", f"{text}; the configuration does not ask for it")]
