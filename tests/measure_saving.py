"""How long a checkpoint keeps training waiting, beside training and not, on two gloo ranks.

    OMP_NUM_THREADS=1 python -m tests.measure_saving [--folder /tmp/saving]

A T5 of T5-small's shape (61 M parameters, 0.73 GB with AdamW's state) under FSDP2; files are
brought to the disk and summed up each time. Figures are medians of five saves after a warm-up.
Run it on an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from t5_fsdp.config import OptimizerConfig, ParallelConfig
from tests.workers import Pool, joined_world

NUM_SAVES = 5
SMALL = {"d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_heads": 8}


def measure(folder: Path, background: bool) -> dict[str, float]:
    """On a rank of the pool: medians of the seconds that `save` took, and until COMPLETE."""
    from transformers import T5Config

    from t5_fsdp.checkpoint.manager import CheckpointManager
    from t5_fsdp.checkpoint.retention import Retention
    from t5_fsdp.model.build import ModelSpec, build_on_meta, draw_weights, num_parameters
    from t5_fsdp.parallel.engine import parallelize
    from t5_fsdp.training.optimizer import make_optimizer
    from tests.checkpoint.test_manager import make_state

    config = T5Config(vocab_size=32128, decoder_start_token_id=0, **SMALL)
    spec = ModelSpec(config, own_head=False)
    blocked, total, size = [], [], []
    with joined_world() as world:
        model = build_on_meta(spec)
        count = num_parameters(model)
        engine = parallelize(model, ParallelConfig(param_dtype="fp32"), world)
        engine.load_full(draw_weights(spec, seed=1) if world.is_main else {})
        optimizer = make_optimizer(engine.model, OptimizerConfig())
        manager = CheckpointManager(
            folder / f"background-{background}",
            world,
            retention=Retention(keep_last=1, keep_best=0, best_metric="loss"),
            background=background,
        )
        manager.on_saved = lambda saved: size.append(saved.num_bytes)
        for step in range(1, NUM_SAVES + 2):
            world.barrier()
            began = time.perf_counter()
            manager.save(engine.model, optimizer, make_state(step), "", folder / "tokenizer")
            blocked.append(time.perf_counter() - began)
            manager.wait()
            total.append(time.perf_counter() - began)
        del model, engine, optimizer, manager
    return {
        "parameters": count,
        "bytes": size[-1] if size else 0,
        "blocked": statistics.median(blocked[1:]),
        "total": statistics.median(total[1:]),
    }


def main() -> None:
    """Print both, and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="On the disk that is to be measured.")
    options = parser.parse_args()
    found: dict[bool, Any] = {}
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        (Path(scratch) / "tokenizer").mkdir()
        for background in (False, True):
            pool = Pool(2)
            found[background] = pool.run(measure, Path(scratch), background)[0]
            pool.close()
    for background, name in ((False, "async_save: false"), (True, "async_save: true")):
        figures = found[background]
        print(
            f"{name}: {figures['parameters'] / 1e6:.1f} M parameters, "
            f"{figures['bytes'] / 1e9:.2f} GB; blocked {figures['blocked']:.2f} s, complete after "
            f"{figures['total']:.2f} s"
        )
    print(f"blocked beside training / not: {found[True]['blocked'] / found[False]['blocked']:.1%}")


if __name__ == "__main__":
    main()
