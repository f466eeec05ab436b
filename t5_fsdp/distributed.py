"""The processes of a run: who they are, how they find each other, agree, fail and end together.

Two channels connect the ranks. The *store* (torchrun's key-value server) is there from the start
and has no timeout: long work such as preparing data is waited for on it. *Collectives* (gloo, NCCL)
carry tensors and fail after a timeout, so that a hang becomes an error.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from t5_fsdp.console import print_out
from t5_fsdp.errors import EXIT_DEFECT, EXIT_USER_ERROR, PeerFailed, UserError
from t5_fsdp.quantities import counted

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch.distributed import Store

T = TypeVar("T")

_POLL_SECONDS = 0.05
_FAILED_KEY = "t5_fsdp/failed"
_LAUNCHER_POLL_SECONDS = 1.0
# For each shape of a bf16 product oneDNN and torch keep the code and the buffers made for it, by
# default of 1,024 shapes. Micro-batches have ever new shapes, so it never ends: half a gigabyte for
# a tiny model. Both read the variables at the first such product.
CPU_KERNEL_CACHES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64", "LRU_CACHE_CAPACITY": "64"}


@dataclass(frozen=True)
class Launch:
    """What the launcher says about this process."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    restart: int = 0
    by_torchrun: bool = False

    @property
    def is_distributed(self) -> bool:
        """Whether there is anything to rendezvous with; also a torchrun of one process."""
        return self.by_torchrun or self.world_size > 1


def read_launch(environment: Mapping[str, str] | None = None) -> Launch:
    """The launch described by torchrun's variables (RANK, WORLD_SIZE, ...), or a single process.

    Raises:
        UserError: one of the variables is no whole number, or they contradict each other.
    """
    environment = os.environ if environment is None else environment
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        return Launch()

    def number(name: str, default: int) -> int:
        try:
            return int(environment.get(name, default))
        except ValueError:
            raise UserError(
                f"the environment variable {name} is {environment[name]!r}; it must be a whole "
                "number (torchrun sets it)"
            ) from None

    world_size = number("WORLD_SIZE", 1)
    launch = Launch(
        rank=number("RANK", 0),
        local_rank=number("LOCAL_RANK", number("RANK", 0)),
        world_size=world_size,
        local_world_size=number("LOCAL_WORLD_SIZE", world_size),
        restart=number("TORCHELASTIC_RESTART_COUNT", 0),
        by_torchrun="TORCHELASTIC_RUN_ID" in environment,
    )
    if not 0 <= launch.rank < launch.world_size:
        raise UserError(
            f"the environment says RANK {launch.rank} of WORLD_SIZE {launch.world_size}; "
            "start the processes with torchrun"
        )
    return launch


def print_once(text: str) -> None:
    """Print on one process only: under torchrun every rank reads the same command line."""
    if os.environ.get("RANK", "0") == "0":
        with contextlib.suppress(BrokenPipeError):  # `| head` has seen enough
            print_out(text.rstrip("\n"))


def wants_colours() -> bool:
    """Unless the environment says otherwise; whether they are shown is up to the stream."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def end_with_launcher(launch: Launch) -> None:
    """Make this process end within seconds when torchrun, which started it, is gone.

    torchrun puts each worker into a session of its own, so they outlive a killed launcher and
    would go on training beside a restarted run.
    """
    name = "launcher-watch"
    if not launch.by_torchrun or any(thread.name == name for thread in threading.enumerate()):
        return
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_LAUNCHER_POLL_SECONDS)
        os._exit(EXIT_DEFECT)

    threading.Thread(target=watch, name=name, daemon=True).start()


def leave(code: int) -> NoReturn:
    """End the process with `code`, without the interpreter's own teardown.

    By now everything is closed and written. Taking down what torch still holds aborted one of 17
    finished runs ("terminate called without an active exception"), and after a failure, with the
    process group still up and a peer gone, it may hang as well.
    """
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None where they were closed
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code)


class World:
    """All ranks of this run as one of them sees them.

    Attributes:
        rank, world_size: from the launch.
        device: where this rank computes.
    """

    def __init__(self, launch: Launch, store: Store, device: torch.device) -> None:
        self.launch = launch
        self.rank, self.world_size = launch.rank, launch.world_size
        self.device = device
        self._store = store
        self._tasks = 0
        # Beside the default group: for collectives of a thread, which must not meet the others'.
        self.background_group: dist.ProcessGroup | None = None
        # Without torchrun rank 0 keeps the store: it has to outlive the others' last question.
        self.hosts_store = False
        # Only a group that is ours is destroyed.
        self.is_connected = False

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def on_rank_zero(self, work: Callable[[], T]) -> T:
        """Run `work` on rank 0 while the others wait, without timeout; all get its result.

        The result travels through the store by pickle: keep it small.

        Raises:
            whatever `work` raises, on rank 0; PeerFailed on the others.
        """
        self._tasks += 1
        key = f"t5_fsdp/{self.launch.restart}/task/{self._tasks}"
        if self.is_main:
            result = work()
            self._store.set(key, pickle.dumps(result).hex())
            return result
        self.wait_for(key)
        return pickle.loads(bytes.fromhex(self._store.get(key).decode()))

    def on_each_node(self, work: Callable[[], T]) -> T:
        """Run `work` on the first rank of each node, all at the same time; its node's result.

        Everybody waits, without timeout, until all nodes are done. As for `on_rank_zero` results
        travel through the store. Every node has as many processes.

        Raises:
            whatever `work` raises, on the rank where it ran; PeerFailed on the others.
        """
        self._tasks += 1
        key = f"t5_fsdp/{self.launch.restart}/task/{self._tasks}"
        own = self.rank - self.launch.local_rank
        if self.launch.local_rank == 0:
            self._store.set(f"{key}/{own}", pickle.dumps(work()).hex())
        for first_rank in range(0, self.world_size, self.launch.local_world_size):
            self.wait_for(f"{key}/{first_rank}")
        return pickle.loads(bytes.fromhex(self._store.get(f"{key}/{own}").decode()))

    def wait_for(self, key: str) -> None:
        """Wait, without timeout and open to signals, until a rank sets `key` in the store.

        Raises:
            PeerFailed: a rank has reported a failure meanwhile.
        """
        while not self._store.check([key]):
            self.raise_if_peer_failed()
            time.sleep(_POLL_SECONDS)

    def raise_if_peer_failed(self) -> None:
        """Raises PeerFailed when another rank has reported its failure."""
        key = self._failed_key
        if self._store.check([key]):
            problems = pickle.loads(bytes.fromhex(self._store.get(f"{key}/problems").decode()))
            raise PeerFailed(int(self._store.get(key).decode()), problems)

    @property
    def _failed_key(self) -> str:
        return f"{_FAILED_KEY}/{self.launch.restart}"

    def claim_failure(self, exit_code: int, problems: tuple[str, ...] = ()) -> bool:
        """Report that this rank fails; True for the first one, which is to tell the user why.

        Args:
            problems: of a UserError, which the other ranks hear as well.
        """
        try:
            first = self._store.add(f"{self._failed_key}/claims", 1) == 1
            if first:
                self._store.set(f"{self._failed_key}/problems", pickle.dumps(problems).hex())
                self._store.set(self._failed_key, str(exit_code))
            return first
        except Exception:  # the store died with its host: better told twice than not at all
            return True

    def absent_ranks(self, wait_seconds: float) -> list[int]:
        """After a failed collective: ranks that do not fail as well within `wait_seconds`.

        A rank that hangs makes the others' collectives time out, and is the one that says nothing.
        """
        keys = {rank: f"{self._failed_key}/present/{rank}" for rank in range(self.world_size)}
        deadline = time.monotonic() + wait_seconds
        try:
            self._store.set(keys[self.rank], "1")
            while absent := [rank for rank, key in keys.items() if not self._store.check([key])]:
                if time.monotonic() > deadline:
                    return absent
                time.sleep(_POLL_SECONDS)
        except Exception:  # the store is gone with its host
            pass
        return []

    def say_goodbye(self, timeout_seconds: float) -> None:
        """Before leaving after a failure: rank 0, where it keeps the store, waits for the others.

        They have yet to ask it whether somebody has told the user already.
        """
        key = f"{self._failed_key}/goodbyes"
        try:
            gone = self._store.add(key, 1)
            deadline = time.monotonic() + timeout_seconds
            while self.hosts_store and gone < self.world_size and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
                gone = self._store.add(key, 0)
        except Exception:  # the store is gone: nobody waits
            return

    def connect(self, timeout_seconds: float) -> None:
        """Set up the process group: NCCL for tensors on GPUs, gloo for those on the CPU."""
        import torch.distributed as dist

        on_gpu = self.device.type == "cuda"
        timeout = timedelta(seconds=timeout_seconds)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            store=dist.PrefixStore(f"group/{self.launch.restart}", self._store),
            rank=self.rank,
            world_size=self.world_size,
            timeout=timeout,
            device_id=self.device if on_gpu else None,
        )
        self.is_connected = True
        self.background_group = dist.new_group(backend="gloo", timeout=timeout)

    def meet(self, should_stop: Callable[[], bool]) -> bool:
        """Wait, without timeout, for all ranks; whether one of them was told to stop meanwhile.

        All get the same answer. To be called, with signals deferred, before what waits for the
        other ranks outside of Python, where no signal is heard.

        Raises:
            PeerFailed: a rank has reported a failure.
        """
        self._tasks += 1
        key = f"t5_fsdp/{self.launch.restart}/meeting/{self._tasks}"
        self._store.add(f"{key}/arrived", 1)
        while not self._store.check([f"{key}/decision"]):
            self.raise_if_peer_failed()
            if should_stop():
                self._store.set(f"{key}/stop", "1")
            if self.is_main:  # it alone decides, once
                stops = self._store.check([f"{key}/stop"])
                if stops or self._store.add(f"{key}/arrived", 0) == self.world_size:
                    self._store.set(f"{key}/decision", "stop" if stops else "go")
            time.sleep(_POLL_SECONDS / 5)
        return self._store.get(f"{key}/decision") == b"stop"

    def disconnect(self) -> None:
        """End the process group; call it when nothing refers to the sharded model any more.

        A process that still holds one when its group is destroyed now and then aborts at exit,
        hence the collection, and the barrier so that nobody's peer leaves before it is done.
        """
        import torch.distributed as dist

        gc.collect()
        if self.is_connected:
            self.barrier()
            dist.destroy_process_group()
            self.is_connected = False

    def barrier(self) -> None:
        """Wait for all ranks (on the CPU backend, bounded by the collective timeout)."""
        self.sum([0.0])

    def sum(self, values: Sequence[float]) -> list[float]:
        """Sums over all ranks, in float64: the same numbers on every rank."""
        import torch
        import torch.distributed as dist

        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor)
        return tensor.tolist()

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor`, of this rank's device, becomes its sum over all ranks. Nobody waits for it."""
        import torch.distributed as dist

        dist.all_reduce(tensor)
        return tensor

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """Every rank's values, in float64 and in the order of ranks, on every rank."""
        import torch
        import torch.distributed as dist

        tensor = torch.tensor(values, dtype=torch.float64)
        gathered = [torch.empty_like(tensor) for _ in range(self.world_size)]
        dist.all_gather(gathered, tensor)
        return [found.tolist() for found in gathered]

    def try_on_rank_zero(self, work: Callable[[], T]) -> T | None:
        """Run `work` on rank 0, between two collectives; its result there, None elsewhere.

        Unlike `on_rank_zero` it is quick enough to be called for every tensor of a model, and bound
        by the collective timeout. A failure must be heard before the next collective: the others
        would wait in there for a rank that has left.

        Raises:
            whatever `work` raises, on rank 0; PeerFailed on the others.
        """
        result, error = None, None
        if self.is_main:
            try:
                result = work()
            except Exception as caught:
                error = caught
        code = EXIT_USER_ERROR if isinstance(error, UserError) else EXIT_DEFECT
        [failed_with] = self.sum([0.0 if error is None else float(code)])
        if error is not None:
            raise error
        if failed_with:
            raise PeerFailed(int(failed_with))
        return result

    def maximum(self, value: float) -> float:
        """The largest value of all ranks."""
        import torch
        import torch.distributed as dist

        tensor = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return float(tensor.item())

    def gather_objects(self, value: Any) -> list[Any] | None:
        """All ranks' values in the order of ranks, on rank 0; None elsewhere."""
        import torch.distributed as dist

        gathered: list[Any] | None = [None] * self.world_size if self.is_main else None
        dist.gather_object(value, gathered)
        return gathered

    def broadcast_object(self, value: T | None) -> T:
        """Rank 0's value on all ranks, by pickle; what the others give does not count."""
        import torch
        import torch.distributed as dist

        values: list[Any] = [value]
        dist.broadcast_object_list(values, src=0, device=torch.device("cpu"))
        return values[0]


def enter_world(launch: Launch) -> World:
    """Find the other ranks through the launcher's store, and this rank's device.

    Raises:
        UserError: more processes than GPUs on this node, or the rendezvous address is missing.
    """
    import torch.distributed as dist

    if not launch.is_distributed:
        return World(launch, dist.HashStore(), pick_device(launch))
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if name not in os.environ:
            raise UserError(f"{name} is not set; start the processes with torchrun")
    # torchrun hosts the store itself; without it (srun) rank 0 does.
    hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = _rendezvous.enter(launch, hosted)
    world = World(launch, store, pick_device(launch))
    world.hosts_store = not hosted and launch.rank == 0
    return world


class _Rendezvous:
    """The launcher's store, entered anew for each run in a process.

    A program may train and then evaluate: rank 0 can't host a second store at the same address,
    and the keys of the first run must not answer the questions of the second.
    """

    def __init__(self) -> None:
        self._address: tuple[str, str] | None = None
        self._store: Store | None = None
        self._times = 0

    def enter(self, launch: Launch, hosted: bool) -> Store:
        import torch.distributed as dist

        address = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
        if self._store is None or address != self._address:
            self._address, self._times = address, 0
            self._store = dist.TCPStore(
                address[0],
                int(address[1]),
                launch.world_size,
                is_master=not hosted and launch.rank == 0,
                timeout=timedelta(minutes=10),
            )
        self._times += 1
        return dist.PrefixStore(f"run/{self._times}", self._store)


_rendezvous = _Rendezvous()


def pick_device(launch: Launch) -> torch.device:
    """This process's GPU by its local rank, or the CPU where there is none.

    Raises:
        UserError: more processes than GPUs on this node.
    """
    import torch

    if not torch.cuda.is_available():
        for name, value in CPU_KERNEL_CACHES.items():
            os.environ.setdefault(name, value)
        return torch.device("cpu")
    num_gpus = torch.cuda.device_count()
    if launch.local_world_size > num_gpus:
        raise UserError(
            f"{launch.local_world_size} processes on this node but {counted(num_gpus, 'GPU')}; "
            f"start with --nproc_per_node {num_gpus}"
        )
    device = torch.device("cuda", launch.local_rank)
    torch.cuda.set_device(device)
    return device
