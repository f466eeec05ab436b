"""The Hub, the adapters between nodes, and the bandwidth between this machine's processes."""

from __future__ import annotations

import ctypes.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from t5_fsdp.cli.machine_checks.finding import Finding, note, ok, problem, shorten
from t5_fsdp.config import Config

_HUB_TIMEOUT_SECONDS = 4.0
_PEERS_TIMEOUT_SECONDS = 120.0
# Bus bandwidth below which GPUs are not connected by NVLink, or not well; P4d has over 200.
_SLOW_GPU_BYTES_PER_SECOND = 20e9
_EFA_PLUGIN_FOLDERS = (
    "/opt/amazon/ofi-nccl/lib", "/opt/amazon/ofi-nccl/lib/x86_64-linux-gnu",
    "/opt/aws-ofi-nccl/lib", "/opt/aws-ofi-nccl/install/lib",
)  # fmt: skip


def check_hub(config: Config) -> Finding:
    """Whether the Hugging Face Hub answers, and if not, whether the run needs it."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    if not _is_folder_or_id(config.model.name):
        return problem(
            "model.name",
            f"{shorten(str(config.model.name))} is neither a folder nor a name that the Hub allows "
            "(OWNER/MODEL); check it",
        )
    if constants.HF_HUB_OFFLINE:
        return judge_hub_absence("HF_HUB_OFFLINE is set", config)
    try:
        get_session().head(constants.ENDPOINT, timeout=_HUB_TIMEOUT_SECONDS)
    except Exception as error:
        why = f"{constants.ENDPOINT} does not answer ({type(error).__name__})"
        return judge_hub_absence(why, config)
    return ok("Hub", f"{constants.ENDPOINT} answers")


def _is_folder_or_id(name: str | None) -> bool:
    from huggingface_hub.utils import validate_repo_id

    try:
        if name and not Path(name).exists():
            validate_repo_id(name)
    except (OSError, ValueError):
        return False
    return True


def judge_hub_absence(why: str, config: Config) -> Finding:
    """A run that needs a model from there can have it in the cache already."""
    from huggingface_hub import try_to_load_from_cache

    name = config.model.name
    needed = name is not None and not Path(name).exists()
    if needed and not isinstance(try_to_load_from_cache(str(name), "config.json"), str):
        return problem(
            "Hub",
            f"{why}, and model.name {name} is not in the cache; download it where there is a "
            f"network (`hf download {name}`) and give its folder, or set HTTPS_PROXY",
        )
    return note("Hub", f"{why}; models and datasets have to be in its cache or in folders")


def rdma_adapters(folder: Path = Path("/sys/class/infiniband")) -> dict[str, str]:
    """Adapters by their names, each with its driver (efa, mlx5_core ...)."""
    found = {}
    for adapter in sorted(folder.glob("*")):
        driver = adapter / "device" / "driver"
        found[adapter.name] = driver.resolve().name if driver.exists() else "unknown"
    return found


def check_adapters(adapters: dict[str, str], has_plugin: bool | None = None) -> list[Finding]:
    """Of several nodes: EFA needs a plugin of NCCL, or all goes over TCP."""
    if not adapters:
        return []
    kinds = ", ".join(sorted(set(adapters.values())))
    text = f"{len(adapters)} ({kinds})"
    if "efa" not in adapters.values():
        return [ok("adapters", text)]
    if has_plugin is None:
        has_plugin = ctypes.util.find_library("nccl-net") is not None or any(
            list(Path(folder).glob("libnccl-net*.so")) for folder in _EFA_PLUGIN_FOLDERS
        )
    if has_plugin:
        return [ok("adapters", f"{text}, with the plugin aws-ofi-nccl")]
    return [
        note(
            "adapters",
            f"{text}, but no aws-ofi-nccl (libnccl-net.so): between nodes NCCL would use TCP; "
            "install it with the EFA installer (docs/launching.md)",
        )
    ]


def check_peers(num_gpus: int) -> Finding:
    """Start processes with torchrun, as a run does, and time an all-reduce between them."""
    num_processes = max(num_gpus, 1) if num_gpus else 2
    what = "peer bandwidth"
    if num_processes == 1:
        return ok(what, "one GPU, no peer")
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        root = Path(__file__).parents[3]
        paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        environment.setdefault("OMP_NUM_THREADS", "1")
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node",
            str(num_processes), "-m", "t5_fsdp.cli.machine_checks.all_reduce", str(result),
        ]  # fmt: skip
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                timeout=_PEERS_TIMEOUT_SECONDS,
                env=environment,
            )
        except subprocess.TimeoutExpired:
            return _judge_failed_peers(num_processes, "no answer", bool(num_gpus))
        if done.returncode != 0 or not result.is_file():
            return _judge_failed_peers(num_processes, last_error(done.stderr), bool(num_gpus))
        measured = json.loads(result.read_text())
    return judge_bandwidth(measured["bytes_per_second"], num_processes, bool(num_gpus))


def last_error(text: str) -> str:
    """The line of torchrun's output that says what went wrong in a process."""
    lines = [line.strip() for line in text.splitlines()]
    errors = [line for line in lines if "Error" in line.split(":")[0] and ": " in line]
    return (errors or [line for line in lines if line] or ["no output"])[0][:200]


def _judge_failed_peers(num_processes: int, why: str, on_gpu: bool) -> Finding:
    remedy = (
        "run it with NCCL_DEBUG=INFO in the environment, or with NCCL_P2P_DISABLE=1 to see whether "
        "it is the direct access between GPUs"
        if on_gpu
        else "the name of this host has to resolve (`getent hosts $(hostname)`), and sockets on it "
        "have to be allowed"
    )
    return problem(
        "peer bandwidth", f"{num_processes} processes could not work together ({why}); {remedy}"
    )


def judge_bandwidth(bytes_per_second: float, num_processes: int, on_gpu: bool) -> Finding:
    """Bus bandwidth of an all-reduce, as NCCL's tests count it."""
    kind = "GPUs (NCCL)" if on_gpu else "CPU processes (gloo)"
    text = f"{bytes_per_second / 1e9:,.1f} GB/s between {num_processes} {kind}"
    if on_gpu and bytes_per_second < _SLOW_GPU_BYTES_PER_SECOND:
        return note(
            "peer bandwidth",
            f"{text}, where NVLink has over 100: full sharding will wait for it; "
            "parallel.sharding: shard_grad_op or LoRA communicate less, `nvidia-smi topo -m` shows "
            "the connections",
        )
    return ok("peer bandwidth", text)
