"""Train a model class of one's own; also under torchrun.

    PYTHONPATH=. python examples/own_model.py

A configuration class and a model class, registered with transformers' Auto classes under a name:
model.config.model_type then chooses it everywhere, also when a checkpoint is evaluated or exported
by a program that has registered it. With model.name and init: pretrained it starts from another
model's weights, as far as the names and shapes of all of them are the same.

It must be an encoder-decoder as transformers has them (get_encoder, get_decoder, an output head).
Blocks that are GradientCheckpointingLayers, as T5's are, become units of sharding and of
recomputation.
"""

from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    T5Config,
    T5ForConditionalGeneration,
)

from t5_fsdp import load_config, summarize, train


class DeepT5Config(T5Config):
    """A T5 whose residual branches are scaled down by a value of the configuration."""

    model_type = "deep_t5"

    def __init__(self, branch_scale: float = 0.5, **values) -> None:
        super().__init__(**values)
        self.branch_scale = branch_scale


class DeepT5(T5ForConditionalGeneration):
    """Scales what each feed-forward layer adds."""

    config_class = DeepT5Config

    def __init__(self, config: DeepT5Config) -> None:
        super().__init__(config)
        for stack in (self.encoder, self.decoder):
            for block in stack.block:
                block.layer[-1].DenseReluDense.register_forward_hook(
                    lambda module, inputs, output: output * config.branch_scale
                )


AutoConfig.register("deep_t5", DeepT5Config)
AutoModelForSeq2SeqLM.register(DeepT5Config, DeepT5)

pairs = [(f"On day {day} they {verb} the {thing}.", f"{verb} {thing}") for day in range(30)
         for verb in ("cut", "bring", "sell") for thing in ("rice", "soil", "bread")]  # fmt: skip
shape = {
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 128,
    "num_layers": 2,
    "num_heads": 4,
    "dropout_rate": 0.0,
}
config = load_config(
    run_dir="runs/deep",
    model={"name": None, "init": "random", "tokenizer": "train", "tokenizer_vocab_size": 160,
           "config": {"model_type": "deep_t5", "branch_scale": 0.7, **shape}},
    parallel={"param_dtype": "fp32", "activation_checkpointing": "none"},
    optimizer={"lr": 1e-2},
    train={"epochs": 10, "global_batch_size": 16},
)  # fmt: skip
result = train(config, data={"train": pairs[20:], "validation": pairs[:20]})
print(summarize(["On day 31 they sell the soil."], result.checkpoint))
