"""Where summaries are generated: by a whole model on each rank, or by one that stays sharded."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from t5_fsdp.config import Config, ParallelConfig
from t5_fsdp.console import Console
from t5_fsdp.distributed import World

if TYPE_CHECKING:
    import torch

    from t5_fsdp.evaluation.evaluate import Generator
    from t5_fsdp.model.build import ModelSpec
    from t5_fsdp.parallel.engine import Engine


def generates_sharded(
    spec: ModelSpec,
    config: Config,
    world: World,
    console: Console,
    engine: Engine | None = None,
) -> bool:
    """What `evaluation.generation_mode` comes to, the same on every rank; a collective.

    Args:
        engine: that holds the weights of a running training; None: they come from files.
    """
    from t5_fsdp.model.build import build_on_meta, num_parameters
    from t5_fsdp.model.devices import free_memory_bytes
    from t5_fsdp.parallel.common import DTYPES

    options = config.evaluation
    if options.generation_mode != "auto":
        return options.generation_mode == "sharded"
    if world.world_size == 1 or (engine is not None and not config.parallel.frees_units):
        return False
    dtype, parameters = DTYPES[config.parallel.param_dtype], num_parameters(build_on_meta(spec))
    needed = whole_model_bytes(spec, config, parameters)
    if engine is not None:
        needed = max(needed, parameters * engine.gather_bytes(dtype))
    free = free_memory_bytes(world.device, world.launch.local_world_size)
    is_short = free is not None and needed > free
    if world.sum([float(is_short)])[0] == 0:
        return False
    console.say(
        f"a whole model and its batches may take {needed / 1e9:.1f} GB a rank for generating, more "
        "than is free: the weights stay sharded, which is slower (evaluation.generation_mode)"
    )
    return True


def whole_model_bytes(spec: ModelSpec, config: Config, num_parameters: int) -> int:
    """What a whole copy of the model and a batch of its longest sources take to generate."""
    from t5_fsdp.model.flops import T5Shape
    from t5_fsdp.model.memory import decoding_bytes
    from t5_fsdp.parallel.common import DTYPES

    options = config.evaluation
    return decoding_bytes(
        T5Shape.of(spec.config),
        num_parameters=num_parameters,
        itemsize=DTYPES[config.parallel.param_dtype].itemsize,
        batch_tokens=options.batch_tokens,
        num_beams=options.num_beams,
        max_source_tokens=config.data.max_source_tokens,
        max_new_tokens=options.max_new_tokens,
        batch_examples=options.batch_examples,
    )


def training_generator(
    engine: Engine, spec: ModelSpec, config: Config, world: World, console: Console
) -> Generator:
    """The running training's weights, to generate with; a collective."""
    from t5_fsdp.evaluation.evaluate import Generator
    from t5_fsdp.model.build import build_with_weights
    from t5_fsdp.parallel.common import DTYPES

    if generates_sharded(spec, config, world, console, engine):
        return Generator(engine.sharded_generation, is_sharded=True)

    def gather() -> contextlib.nullcontext[Any]:
        engine.after_evaluation()  # the loss is done
        weights = engine.gather_full(DTYPES[config.parallel.param_dtype])
        return contextlib.nullcontext(build_with_weights(spec, weights, config.model.attention))

    return Generator(gather)


def shard_for_generation(
    spec: ModelSpec, weights: Mapping[str, torch.Tensor], config: Config, world: World
) -> Generator:
    """Spread a model over all ranks, which rank 0 reads tensor by tensor; a collective.

    Always by FSDP2 over all ranks, whatever the model was trained by: it reads as little at a time
    as any, and frees every block.
    """
    from t5_fsdp.evaluation.evaluate import Generator
    from t5_fsdp.model.build import build_on_meta
    from t5_fsdp.parallel.engine import parallelize

    options = ParallelConfig(
        param_dtype=config.parallel.param_dtype,
        tf32=config.parallel.tf32,
        activation_checkpointing="none",
    )
    engine = parallelize(build_on_meta(spec, config.model.attention), options, world)
    engine.load_full(weights if world.is_main else {})
    return Generator(engine.sharded_generation, is_sharded=True)
