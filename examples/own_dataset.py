"""Train on a dataset class of one's own; also under torchrun.

    PYTHONPATH=. python examples/own_dataset.py

Anything with __len__ and __getitem__ will do, e.g. a torch Dataset that reads a database. Its
examples are written as JSON Lines into the cache folder, named by their content: so they are
checked and counted as files are, and a run that was interrupted goes on only with the same ones.
"""

import random

from torch.utils.data import Dataset

from t5_fsdp import load_config, train


class Orders(Dataset):
    """Orders made up by a seed; a real one would look them up."""

    def __init__(self, size: int, seed: int) -> None:
        self.size, self.seed = size, seed

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, str]:
        """Mappings may have any columns; data.document_column and summary_column choose two."""
        draw = random.Random(f"{self.seed} {index}")
        verb, thing = draw.choice(["cut", "bring", "sell"]), draw.choice(["rice", "soil", "bread"])
        order = f"Please {verb} {draw.randint(2, 9)} pieces of {thing} by {draw.randint(1, 12)} pm."
        return {"id": f"order-{index}", "text": order, "title": f"{verb} {thing}"}


config = load_config(
    run_dir="runs/orders",
    data={"document_column": "text", "summary_column": "title"},
    model={"name": None, "init": "random", "tokenizer": "train", "tokenizer_vocab_size": 160,
           "config": {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}},
    parallel={"param_dtype": "fp32", "activation_checkpointing": "none"},
    optimizer={"lr": 1e-2},
    train={"epochs": 10, "global_batch_size": 16},
)  # fmt: skip
result = train(config, data={"train": Orders(200, seed=1), "validation": Orders(20, seed=2)})
print(f"{result.message}; ROUGE-1 {100 * result.scores['rouge1']:.1f}")
