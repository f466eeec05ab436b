"""Choose the best checkpoint by a metric of one's own.

    PYTHONPATH=. python examples/own_metric.py

The metric is a function of all predictions and references of a validation; its figures stand beside
ROUGE in metrics.jsonl, TensorBoard and rouge.json, and evaluation.best_metric may name one.
"""

from t5_fsdp import evaluate, load_config, train


def numbers_kept(predictions: list[str], references: list[str]) -> dict[str, float]:
    """Share of the references' numbers that the predictions have."""
    wanted = [{word for word in text.split() if word.isdigit()} for text in references]
    kept = [len(w & set(p.split())) for w, p in zip(wanted, predictions, strict=True)]
    return {"numbers_kept": sum(kept) / max(1, sum(map(len, wanted)))}


pairs = [(f"We sold {n} boxes in room {m}.", f"sold {n}") for m in range(20) for n in range(5)]
config = load_config(
    run_dir="runs/numbers",
    model={"name": None, "init": "random", "tokenizer": "train", "tokenizer_vocab_size": 170,
           "config": {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}},
    parallel={"param_dtype": "fp32", "activation_checkpointing": "none"},
    optimizer={"lr": 1e-2},
    train={"epochs": 20, "global_batch_size": 10},
    evaluation={"every_steps": 40, "best_metric": "numbers_kept", "num_beams": 1},
)  # fmt: skip
data = {"train": pairs[::2], "validation": pairs[1::4]}
result = train(config, data=data, metric=numbers_kept)
print(f"best: {result.checkpoint}, numbers kept {result.scores['numbers_kept']:.2f}")
found = evaluate(result.run_dir, data=pairs[3::4], metric=numbers_kept, quiet=True)
print(f"on others: {found.scores['numbers_kept']:.2f}")
