"""Fine-tune on pairs that a program has at hand.

    PYTHONPATH=. python examples/finetune_pairs.py

Also under torchrun. Here a tiny model learns from scratch to say what was done. For a pretrained
one leave out `model` and `optimizer`: T5-small is then fetched from the Hugging Face Hub.
"""

from t5_fsdp import load_config, summarize, train

pairs = [(f"On day {day} they {verb} the {thing}.", f"{verb} {thing}") for day in range(30)
         for verb in ("cut", "bring", "sell") for thing in ("rice", "soil", "bread")]  # fmt: skip
config = load_config(
    run_dir="runs/pairs",
    model={"name": None, "init": "random", "tokenizer": "train", "tokenizer_vocab_size": 160,
           "config": {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}},
    parallel={"param_dtype": "fp32", "activation_checkpointing": "none"},
    optimizer={"lr": 5e-3},
    train={"epochs": 10, "global_batch_size": 16},
)  # fmt: skip
result = train(config, data={"train": pairs[20:], "validation": pairs[:20]})
print(summarize(["On day 31 they sell the soil."], result.checkpoint))
