"""Largest resident memory of two ranks while they load a model.

    python -m tests.measure_loading [--engine fsdp2] [--folder /tmp/t5]

writes a random T5 of T5-base's shape (223 M parameters) as a Hugging Face folder of several files,
in float32 and in bf16, and as a checkpoint of ours; loads each on two gloo processes of its own as
`train` does, and prints by how much the resident memory of each has grown at most, over the
model's float32 bytes. Pages of files that a process maps count. It takes 4 GB of memory.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch

from t5_fsdp.config import ModelConfig, ParallelConfig
from tests.workers import Pool, joined_world

BASE = {"d_model": 768, "d_kv": 64, "d_ff": 3072, "num_layers": 12, "num_heads": 12}
KINDS = ("float32", "bfloat16", "checkpoint")
FILE_SIZE = "200MB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=("fsdp2", "fsdp1", "ddp"), default="fsdp2")
    parser.add_argument("--folder", type=Path, help="Keep the models here.")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        for kind in KINDS:
            path = write_model(options.folder or Path(scratch), kind)
            shares = measure(path, options.engine)
            said = ", ".join(f"rank {rank} {share:.3f}" for rank, share in enumerate(shares))
            print(f"{options.engine}, {kind}: grown by {said} of the float32 bytes", flush=True)


def write_model(folder: Path, kind: str) -> Path:
    """A random T5, unless it is there."""
    from transformers import T5Config, T5ForConditionalGeneration

    path = folder / kind
    if path.exists():
        return path
    torch.manual_seed(0)
    config = T5Config(vocab_size=32128, decoder_start_token_id=0, **BASE)
    with torch.device("meta"):
        model = T5ForConditionalGeneration(config)
    model.to(torch.bfloat16 if kind == "bfloat16" else torch.float32).to_empty(device="cpu")
    model.tie_weights()
    for parameter in model.parameters():
        parameter.data.normal_()
    if kind != "checkpoint":
        model.save_pretrained(path, max_shard_size=FILE_SIZE)
        return path
    import torch.distributed.checkpoint as dcp

    from t5_fsdp.model.build import unique_state_dict

    dcp.save({"model": unique_state_dict(model)}, checkpoint_id=path, no_dist=True)
    config.save_pretrained(path)
    return path


def measure(path: Path, engine: str) -> list[float]:
    """Growth of the largest resident memory of two fresh ranks, over the float32 bytes."""
    pool = Pool(2)
    try:
        return pool.run(load_and_watch, str(path), engine)
    finally:
        pool.close()


def load_and_watch(path: str, engine: str) -> float:
    """On a rank of the pool: load, and compare the peak since before with the model's bytes."""
    from transformers import AutoConfig

    from t5_fsdp.checkpoint.stored_weights import load_weights
    from t5_fsdp.model.build import ModelSpec, build_on_meta, num_parameters
    from t5_fsdp.model.pretrained import InitialWeights, open_pretrained
    from t5_fsdp.parallel.engine import parallelize

    options = ParallelConfig(engine=engine)  # type: ignore[arg-type]
    with joined_world() as world:
        build_on_meta(ModelSpec(AutoConfig.for_model("t5"), own_head=False))  # imports more
        Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
        before = _resident("VmRSS")
        spec = ModelSpec(AutoConfig.from_pretrained(path), own_head=False)
        opened = InitialWeights({}, False)
        is_checkpoint = (Path(path) / ".metadata").exists()
        if world.is_main and not is_checkpoint:
            opened = open_pretrained(ModelConfig(name=path), spec)
        model: Any = build_on_meta(spec)
        size = 4 * num_parameters(model)
        loaded = parallelize(model, options, world)
        if is_checkpoint:
            loaded.materialize()
            load_weights(Path(path), loaded.model)
        else:
            loaded.load_full(opened.tensors)
        growth = _resident("VmHWM") - before
        del model, loaded
    return growth / size


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    [value] = [line.split()[1] for line in lines if line.startswith(f"{field}:")]
    return int(value) * 1024


if __name__ == "__main__":
    main()
