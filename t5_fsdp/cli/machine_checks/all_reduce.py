"""A process of the bandwidth check, started by torchrun: times an all-reduce.

Rank 0 writes {"bytes_per_second": ...} to the file that is its only argument: the bus bandwidth,
2 (n - 1) / n x bytes / seconds, as NCCL's own tests count it.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from t5_fsdp.distributed import end_with_launcher, pick_device, read_launch

_ROUNDS = 5
_TIMEOUT_SECONDS = 60.0


def measure(device: torch.device) -> float:
    """Bus bandwidth in bytes a second; the process group is up."""
    on_gpu = device.type == "cuda"
    tensor = torch.ones((256 if on_gpu else 8) * 2**18, device=device)  # MiB of float32
    dist.all_reduce(tensor)  # connects
    if on_gpu:
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    for _ in range(_ROUNDS):
        dist.all_reduce(tensor)
    if on_gpu:
        torch.cuda.synchronize(device)
    seconds = (time.perf_counter() - began) / _ROUNDS
    num_ranks = dist.get_world_size()
    return 2 * (num_ranks - 1) / num_ranks * tensor.nbytes / seconds


def main(result: Path) -> None:
    """Measure, and write the result on rank 0."""
    from datetime import timedelta

    launch = read_launch()
    end_with_launcher(launch)  # torchrun's processes outlive it otherwise
    device = pick_device(launch)
    on_gpu = device.type == "cuda"
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        timeout=timedelta(seconds=_TIMEOUT_SECONDS),
        device_id=device if on_gpu else None,
    )
    bandwidth = measure(device)
    if dist.get_rank() == 0:
        result.write_text(json.dumps({"bytes_per_second": bandwidth}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
