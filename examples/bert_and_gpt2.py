"""A BERT and a GPT-2 through the engines of t5_fsdp.

    torchrun --standalone --nproc_per_node 2 examples/bert_and_gpt2.py --model bert --engine fsdp2
    torchrun --standalone --nproc_per_node 2 examples/bert_and_gpt2.py --model gpt2 --engine fsdp1

Both are small and start from random weights. BERT learns how many steps a how-to of the bundled
sample has, from its summary; GPT-2 learns to write such summaries, letter by letter. transformers'
models name their blocks, so they are sharded and recomputed block by block like T5. One word
changes the engine, and the losses stay the same.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from t5_fsdp.config import ParallelConfig
from t5_fsdp.distributed import World, enter_world, leave, read_launch
from t5_fsdp.model.build import unique_state_dict
from t5_fsdp.parallel.engine import Engine, check_optimizer, parallelize

SAMPLE = Path(__file__).resolve().parents[1] / "data" / "sample" / "train.jsonl"
GLOBAL_BATCH, TOKENS = 32, 128
# A letter is a token: there is nothing to download.
PADDING, START, VOCAB = 0, 1, 130


def read_articles() -> tuple[torch.Tensor, torch.Tensor]:
    """Letters of each article's summary, int64 [articles, TOKENS], and its number of steps."""
    ids, steps = [], []
    for line in SAMPLE.read_text(encoding="utf-8").splitlines():
        summary = json.loads(line)["summary"]
        letters = [START, *(2 + ord(letter) for letter in summary if ord(letter) < VOCAB - 2)]
        ids.append((letters + [PADDING] * TOKENS)[:TOKENS])
        steps.append(summary.count("\n") + 1)
    return torch.tensor(ids), torch.tensor(steps)


def build(name: str) -> nn.Module:
    """A small model with random weights, the same on every rank."""
    from transformers import (
        BertConfig,
        BertForSequenceClassification,
        GPT2Config,
        GPT2LMHeadModel,
    )

    torch.manual_seed(1)
    if name == "bert":
        return BertForSequenceClassification(
            BertConfig(
                vocab_size=VOCAB,
                hidden_size=64,
                num_hidden_layers=4,
                num_attention_heads=4,
                intermediate_size=256,
                max_position_embeddings=TOKENS,
                num_labels=8,
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
            )
        )
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCAB,
            n_embd=64,
            n_layer=4,
            n_head=4,
            n_positions=TOKENS,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=START,
            eos_token_id=START,
        )
    )


def loss_of(name: str, model: Any, ids: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    """Cross-entropy summed over rows (BERT) or letters (GPT-2)."""
    mask = (ids != PADDING).long()
    if name == "bert":
        logits = model(input_ids=ids, attention_mask=mask).logits
        return F.cross_entropy(logits, steps, reduction="sum")
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1]
    return F.cross_entropy(
        logits.flatten(0, 1), ids[:, 1:].flatten(), ignore_index=PADDING, reduction="sum"
    )


def train(name: str, engine: Engine, num_steps: int, world: World) -> None:
    """Print the loss as it falls, on rank 0."""
    optimizer = torch.optim.AdamW(engine.model.parameters(), lr=1e-3)
    check_optimizer(optimizer, engine.model)
    ids, steps = read_articles()
    for step in range(num_steps):
        start = step * GLOBAL_BATCH % (len(ids) - GLOBAL_BATCH)
        rows = torch.arange(start, start + GLOBAL_BATCH)
        # Summed losses are divided by what the whole batch has, not by this rank's part of it.
        count = len(rows) if name == "bert" else int((ids[rows, 1:] != PADDING).sum())
        mine = rows[world.rank :: world.world_size]
        with engine.micro_batch(is_last=True):
            loss = loss_of(
                name, engine.model, ids[mine].to(world.device), steps[mine].to(world.device)
            )
            engine.backward(loss / count)
        engine.clip_grad_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = world.sum([float(loss.detach())])[0] / count
        if world.is_main and (step % 10 == 0 or step == num_steps - 1):
            print(f"step {step + 1}: loss {mean:.5f}", flush=True)


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description="BERT and GPT-2 under FSDP and DDP.")
    parser.add_argument("--model", choices=["bert", "gpt2"], default="bert")
    parser.add_argument("--engine", choices=["fsdp2", "fsdp1", "ddp"], default="fsdp2")
    parser.add_argument("--steps", type=int, default=50)
    options = parser.parse_args()
    world = enter_world(read_launch())
    world.connect(timeout_seconds=120)
    model = build(options.model)
    weights = {name: tensor.clone() for name, tensor in unique_state_dict(model).items()}
    engine = parallelize(model, ParallelConfig(engine=options.engine, param_dtype="fp32"), world)
    engine.load_full(weights)
    train(options.model, engine, options.steps, world)
    del model, engine
    world.disconnect()
    return 0


if __name__ == "__main__":
    leave(main())
