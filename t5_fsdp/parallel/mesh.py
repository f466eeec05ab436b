"""The ranks as a mesh of replicas, each of which is sharded."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from t5_fsdp.config import ParallelConfig
from t5_fsdp.distributed import World


def num_replicas(options: ParallelConfig, world: World) -> int:
    """Groups of ranks that hold a whole copy each: as configured, by default one a node."""
    if options.num_replicas is not None:
        return options.num_replicas
    return max(1, world.world_size // world.launch.local_world_size)


def num_shards(options: ParallelConfig, world: World) -> int:
    """Ranks that share one copy of the model."""
    if options.engine == "ddp" or options.sharding == "no_shard":
        return 1
    if options.sharding == "hybrid_shard":
        return world.world_size // num_replicas(options, world)
    return world.world_size


def shard_index(options: ParallelConfig, world: World) -> int:
    """Which of the shards of a copy this rank holds; neighbours share a copy."""
    return world.rank % num_shards(options, world)


def make_mesh(options: ParallelConfig, world: World) -> DeviceMesh:
    """The mesh that the sharding asks for: (replicate, shard) or all ranks in one dimension."""
    if options.sharding == "hybrid_shard":
        return _hybrid_mesh(options, world)
    return init_device_mesh(world.device.type, (world.world_size,), mesh_dim_names=("shard",))


def _hybrid_mesh(options: ParallelConfig, world: World) -> DeviceMesh:
    """(replicate, shard): neighbours share a copy, so that its shards stay within a node."""
    replicas = num_replicas(options, world)
    shape = (replicas, world.world_size // replicas)
    return init_device_mesh(world.device.type, shape, mesh_dim_names=("replicate", "shard"))


def mesh_problems(options: ParallelConfig, world: World) -> list[str]:
    """What the sharding options ask of the number of ranks and does not hold, one line each."""
    problems = []
    size = world.world_size
    if options.sharding == "hybrid_shard":
        replicas = num_replicas(options, world)
        name = f"parallel.num_replicas {replicas}"
        if options.num_replicas is None:
            name += " (null: one a node)"
        if size % replicas:
            problems.append(f"{name} does not divide the {size} ranks; give a divisor")
        elif size // replicas < 2:
            problems.append(
                f"{name} leaves each of the {size} ranks a copy of its own, with nothing to "
                "shard; use parallel.engine: ddp, or more ranks with fewer replicas"
            )
        elif replicas < 2:
            problems.append(
                f"{name}: one replica is parallel.sharding: full_shard; use that, or give more"
            )
    if options.engine == "fsdp1" and options.cpu_offload and world.device.type == "cpu":
        problems.append(
            "parallel.cpu_offload cannot run with parallel.engine: fsdp1 without a GPU; use fsdp2, "
            "or set it to false"
        )
    if options.sharding == "hybrid_shard" and not problems:
        size //= num_replicas(options, world)
    reshard = options.reshard_after_forward
    if (
        isinstance(reshard, int)
        and not isinstance(reshard, bool)
        and (reshard < 2 or reshard >= size or size % reshard)
    ):
        divisors = [str(number) for number in range(2, size) if size % number == 0]
        remedy = (
            f"give {' or '.join(divisors)}, true or false" if divisors else "give true or false"
        )
        problems.append(
            f"parallel.reshard_after_forward {reshard} has to divide the {size} ranks that share a "
            f"copy, and lie between 1 and all of them; {remedy}"
        )
    return problems
