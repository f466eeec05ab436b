"""What a GPT of 10^12 parameters takes on each of 1,024 GPUs, found out on a laptop.

    python examples/plan_gpt_1t.py
    python examples/plan_gpt_1t.py --world_size 2048 --layers 128 --width 25600 --tokens 2048

The shape is that of Narayanan et al. 2021 (128 layers, width 25,600, 160 heads). No GPU, no weights
and little memory are needed: one rank's real training step runs on tensors that have a size but no
content (docs/planning.md). The same two functions, `build` and `loss_of`, plan any model.
"""

from __future__ import annotations

import argparse
import functools
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from t5_fsdp.config import OptimizerConfig, ParallelConfig
from t5_fsdp.console import Console
from t5_fsdp.errors import UserError
from t5_fsdp.planning.simulation import Simulation, simulate_model

VOCAB = 51200


def build(layers: int, width: int, heads: int, tokens: int) -> nn.Module:
    """A GPT-2 of that shape, without memory."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "gpt2", vocab_size=VOCAB, n_embd=width, n_layer=layers, n_head=heads, n_positions=tokens
    )
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def loss_of(model: Any, *, rows: int, tokens: int) -> torch.Tensor:
    """Mean cross-entropy of the next token."""
    ids = torch.zeros(rows, tokens, dtype=torch.int64)
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def plan(options: argparse.Namespace) -> Simulation:
    """Simulate the step, with a line of progress now and then."""
    shape = (options.layers, options.width, options.heads, options.tokens)
    with Console(stream=sys.stderr).progress(100, "simulating") as progress:
        percent = 0

        def advance(done: int, total: int) -> None:
            nonlocal percent
            progress.advance(100 * done // total - percent)
            percent = 100 * done // total

        return simulate_model(
            functools.partial(build, *shape),
            functools.partial(loss_of, rows=options.rows, tokens=options.tokens),
            ParallelConfig(),
            OptimizerConfig(),
            world_size=options.world_size,
            devices_per_node=8,
            progress=advance,
        )


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description="Memory of a very large GPT on many GPUs.")
    parser.add_argument("--world_size", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=128)
    parser.add_argument("--width", type=int, default=25600)
    parser.add_argument("--heads", type=int, default=160)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rows", type=int, default=1)
    options = parser.parse_args()
    try:
        found = plan(options)
    except UserError as error:
        print(error.render(), file=sys.stderr)
        return 2
    count = sum(p.numel() for p in build(*list(vars(options).values())[1:5]).parameters())
    print(f"{count:,} parameters on {options.world_size:,} GPUs, {found.seconds:.0f} s\n")
    for name, value in found.parts.to_json().items():
        print(f"{name.removesuffix('_bytes').replace('_', ' '):16}{value / 2**30:8.2f} GiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
