"""Measures each way to shard on two gloo ranks, for the table in docs/parallelism.md.

    OMP_NUM_THREADS=1 python -m tests.measure_parallelism

Per mode: bytes that a rank holds of parameters, gradients and moments, bytes that a rank hands to
collectives in a step (as the profiler sees them), and the time of a step relative to ddp's. Run it
on an otherwise idle machine; it takes about two minutes.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import numpy as np

from t5_fsdp.config import OptimizerConfig, ParallelConfig
from tests.parallel.test_engines import local_bytes
from tests.workers import Pool, joined_world

MODES: list[dict[str, Any]] = [
    {"engine": "ddp"},
    {"engine": "fsdp2"},
    {"engine": "fsdp2", "sharding": "shard_grad_op"},
    {"engine": "fsdp2", "cpu_offload": True},
    {"engine": "fsdp1"},
    {"engine": "fsdp1", "sharding": "shard_grad_op"},
    {"engine": "fsdp1", "sharding": "no_shard"},
]
HYBRID: list[dict[str, Any]] = [
    {"engine": "fsdp2", "sharding": "hybrid_shard", "num_replicas": 2},
]
WARM_UP_STEPS, TIMED_STEPS = 2, 5


def describe() -> Any:
    """A T5 of 13 million parameters."""
    from transformers import T5Config

    from t5_fsdp.model.build import ModelSpec

    config = T5Config(
        vocab_size=8064, d_model=256, d_kv=32, d_ff=1024, num_layers=6, num_heads=8,
        dropout_rate=0.0, decoder_start_token_id=0,
    )  # fmt: skip
    return ModelSpec(config, own_head=False)


def measure(options: dict[str, Any]) -> dict[str, Any]:
    """On a rank of the pool: figures of one mode."""
    from t5_fsdp.model.build import build_on_meta, draw_weights, num_parameters
    from t5_fsdp.model.forward import attach_loss
    from t5_fsdp.model.loss import LossOptions
    from t5_fsdp.parallel.engine import parallelize

    spec = describe()
    with joined_world() as world:
        model = build_on_meta(spec)
        count = num_parameters(model)
        attach_loss(model, LossOptions())
        parallel = ParallelConfig(param_dtype="fp32", activation_checkpointing="none", **options)
        engine = parallelize(model, parallel, world)
        engine.load_full(draw_weights(spec, seed=1) if world.is_main else {})
        figures = measure_steps(engine)
        del model, engine
    return {"count": count, **figures}


def measure_steps(engine: Any) -> dict[str, Any]:
    """Bytes that this rank holds, bytes in collectives, seconds a step."""
    from torch.profiler import ProfilerActivity, profile

    from t5_fsdp.data.collation import SpecialIds, collate
    from t5_fsdp.training.optimizer import make_optimizer

    rng = np.random.default_rng(1)
    optimizer = make_optimizer(engine.model, OptimizerConfig())
    rows = [rng.integers(2, 8000, 96) for _ in range(4)]
    targets = [rng.integers(2, 8000, 32) for _ in range(4)]
    micro = collate(rows, targets, SpecialIds(0, 0))
    sizes: dict[str, int] = {}

    def step() -> None:
        with engine.micro_batch(is_last=True):
            objective, _ = engine.model(**micro.loss_inputs())
            engine.backward(objective / 256)
        engine.clip_grad_norm(1.0)
        sizes.update(local_bytes(engine.model, optimizer))
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(WARM_UP_STEPS):
        step()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        step()
    began = time.perf_counter()
    for _ in range(TIMED_STEPS):
        step()
    seconds = (time.perf_counter() - began) / TIMED_STEPS
    return {"sizes": sizes, "sent": collectives(profiler), "seconds": seconds}


def collectives(profiler: Any) -> Counter[str]:
    """float32 bytes that a rank handed to each kind of collective (an all-gather: its shard)."""
    sent: Counter[str] = Counter()
    for event in profiler.events():
        if not event.name.startswith("gloo:") or not event.input_shapes:
            continue
        elements = sum(int(np.prod(shape)) for shape in event.input_shapes if shape)
        sent[event.name.removeprefix("gloo:")] += 4 * elements
    return sent


def main() -> None:
    """Print the table."""
    print(f"| {'mode':<44} | bytes a parameter a rank | collectives, x model | step, x ddp |")
    base = None
    for world_size, modes in ((2, MODES), (4, HYBRID)):
        pool = Pool(world_size)
        for options in modes:
            found = pool.run(measure, options)[0]
            base = base or found["seconds"]
            held = sum(found["sizes"].values()) / found["count"]
            whole = 4 * found["count"]
            sent = ", ".join(f"{n} {s / whole:.2f}" for n, s in found["sent"].items())
            name = " ".join(f"{n}={v}" for n, v in options.items())
            name += "" if world_size == 2 else f" ({world_size} ranks)"
            print(f"| {name:<44} | {held:.2f} | {sent} | {found['seconds'] / base:.2f} |")
        pool.close()


if __name__ == "__main__":
    main()
