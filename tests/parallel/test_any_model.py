"""Models that are no T5 through every engine: a conv net, BERT, GPT-2, BART, Pegasus."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

from t5_fsdp.config import ParallelConfig
from tests.workers import joined_world

NUM_STEPS = 3
ROWS = 8


class ConvNet(nn.Module):
    """With buffers of both kinds, and a weight that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU())
        self.mix = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.mix[1].weight = self.mix[0].weight
        self.head = nn.Linear(6, 5)
        self.register_buffer("scale", torch.arange(1.0, 7.0) / 3, persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        states = self.features(inputs).mean((2, 3)) * self.scale
        for layer in self.mix:
            states = layer(states).tanh()
        return self.head(states)


def make_conv_net() -> nn.Module:
    net = ConvNet()
    with torch.no_grad():  # statistics of a net that was trained before
        net.features[1].running_mean.uniform_(-1, 1)
        net.features[1].running_var.uniform_(0.5, 2)
        net.features[1].num_batches_tracked.fill_(7)
    return net


def make_bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=37, hidden_size=24, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=40, max_position_embeddings=16, num_labels=5,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return BertForSequenceClassification(config)


def make_gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=37, n_embd=24, n_layer=3, n_head=4, n_positions=16,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def make_seq2seq(model_type: str) -> nn.Module:
    from transformers import AutoConfig, AutoModelForSeq2SeqLM

    config = AutoConfig.for_model(
        model_type, vocab_size=37, d_model=24, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=40,
        decoder_ffn_dim=40, max_position_embeddings=16, dropout=0.0, forced_eos_token_id=1,
    )  # fmt: skip
    model = AutoModelForSeq2SeqLM.from_config(config)
    with torch.no_grad():
        model.final_logits_bias.normal_()
    return model


MODELS = {
    "conv": make_conv_net,
    "bert": make_bert,
    "gpt2": make_gpt2,
    "bart": functools.partial(make_seq2seq, "bart"),
    "pegasus": functools.partial(make_seq2seq, "pegasus"),
}


def build(name: str) -> nn.Module:
    """The same model with the same values every time, in the mode in which buffers count."""
    torch.manual_seed(4)
    return MODELS[name]().eval()


def row_loss(name: str, model: Any, rows: list[int]) -> torch.Tensor:
    """Cross-entropy summed over the rows of a batch."""
    generator = torch.Generator().manual_seed(6)
    if name == "conv":
        inputs = torch.randn((NUM_STEPS * ROWS, 1, 8, 8), generator=generator)[rows]
        labels = torch.randint(5, (NUM_STEPS * ROWS,), generator=generator)[rows]
        return nn.functional.cross_entropy(model(inputs), labels, reduction="sum")
    ids = torch.randint(37, (NUM_STEPS * ROWS, 12), generator=generator)[rows]
    if name == "bert":
        logits = model(input_ids=ids).logits
        return nn.functional.cross_entropy(logits, ids[:, 0] % 5, reduction="sum")
    inputs = {"input_ids": ids, "use_cache": False}
    if name != "gpt2":
        inputs["decoder_input_ids"] = ids.flip(1)
    logits = model(**inputs).logits[:, :-1]
    return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")


def freeze_some(model: nn.Module) -> None:
    """Every third parameter stays as it is."""
    for number, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(number % 3 != 0)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.SGD(trained, lr=0.05)


@functools.cache
def plain(name: str, frozen: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses, and everything that the model holds afterwards, buffers of both kinds included."""
    model = build(name)
    if frozen:
        freeze_some(model)
    optimizer = make_optimizer(model)
    losses = []
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        total = sum(row_loss(name, model, [step * ROWS + row]) for row in range(ROWS))
        (total / ROWS).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(float(total) / ROWS)
    tensors = (*model.named_parameters(), *model.named_buffers())
    return losses, {name: tensor.detach().clone() for name, tensor in tensors}


def train(
    name: str, parallel: dict[str, Any], frozen: bool, on_meta: bool
) -> tuple[list[float], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """On a rank of the pool: losses, gathered weights, this rank's buffers."""
    from t5_fsdp.model.build import unique_state_dict
    from t5_fsdp.parallel.common import clean_name
    from t5_fsdp.parallel.engine import check_optimizer, parallelize

    options = ParallelConfig(
        **{"param_dtype": "fp32", "activation_checkpointing": "none", **parallel}
    )
    with joined_world() as world:
        weights = unique_state_dict(build(name).double()) if world.is_main else {}
        if on_meta:
            with torch.device("meta"):
                model = build(name)
        else:
            model = build(name)
            if not world.is_main:  # the loaded values count, not those of the other ranks
                torch.nn.init.constant_(next(model.parameters()), 9.0)
        if frozen:
            freeze_some(model)
        engine = parallelize(model, options, world)
        engine.load_full(weights)
        optimizer = make_optimizer(engine.model)
        check_optimizer(optimizer, engine.model)
        losses = []
        for step in range(NUM_STEPS):
            rows = list(range(step * ROWS, (step + 1) * ROWS))[world.rank :: world.world_size]
            with engine.micro_batch(is_last=True):
                loss = row_loss(name, engine.model, rows)
                engine.backward(loss / ROWS)
            engine.clip_grad_norm(1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(world.sum([float(loss.detach())])[0] / ROWS)
        gathered = {
            key: tensor.clone() for key, tensor in engine.gather_full(torch.float32).items()
        }
        buffers = {clean_name(k): b.clone() for k, b in engine.model.named_buffers()}
        del engine, optimizer
    return losses, gathered, buffers


ENGINES: list[dict[str, Any]] = [
    {"engine": "fsdp2"},
    {"engine": "fsdp1"},
    {"engine": "ddp"},
    {"engine": "fsdp2", "wrap": "size", "wrap_min_parameters": 50},
    {"engine": "fsdp1", "wrap": "size", "wrap_min_parameters": 50},
]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "parallel",
    [
        pytest.param(
            options,
            id="-".join(map(str, options.values())),
            # FSDP2 shows what small units do.
            marks=[pytest.mark.exhaustive] if options is ENGINES[-1] else [],
        )
        for options in ENGINES
    ],
)
def test_a_model_that_is_no_t5_equals_plain_pytorch(
    pools: Any, name: str, parallel: dict[str, Any]
) -> None:
    kinds = [(False, False), (True, False)]
    if name != "conv":  # its own values of a buffer that no file holds can't be known
        kinds.append((False, True))
    for frozen, on_meta in kinds:
        losses, tensors = plain(name, frozen)
        for found in pools(2).run(train, name, parallel, frozen, on_meta):
            assert found[0] == pytest.approx(losses, rel=1e-5)
            assert set(found[1]) | set(found[2]) == set(tensors)
            for key, expected in tensors.items():
                for held in (found[1], found[2]):
                    if key in held:
                        torch.testing.assert_close(held[key], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("engine", ["fsdp2", "fsdp1", "ddp"])
@pytest.mark.parametrize("name", ["bert", "gpt2", "pegasus"])
def test_blocks_that_are_no_t5s_are_recomputed(pools: Any, name: str, engine: str) -> None:
    losses, _ = plain(name, False)
    parallel = {"engine": engine, "activation_checkpointing": "full"}
    for found in pools(2).run(train, name, parallel, False, False):
        assert found[0] == pytest.approx(losses, rel=1e-5)


def test_the_blocks_of_models_that_are_no_t5() -> None:
    from t5_fsdp.parallel.wrapping import find_blocks

    assert [name for name, _ in find_blocks(build("bert"))] == [
        f"bert.encoder.layer.{i}" for i in range(2)
    ]
    assert [name for name, _ in find_blocks(build("gpt2"))] == [
        f"transformer.h.{i}" for i in range(3)
    ]
    assert [name for name, _ in find_blocks(build("bart"))] == [
        f"model.{stack}.layers.{i}" for stack in ("encoder", "decoder") for i in range(2)
    ]
    assert find_blocks(build("conv")) == []


def test_a_model_without_blocks_is_not_recomputed_silently() -> None:
    from t5_fsdp.errors import UserError
    from t5_fsdp.parallel import activation_checkpointing

    with pytest.raises(UserError, match="ConvNet names no repeated blocks"):
        activation_checkpointing.apply(build("conv"), ParallelConfig())
    stack = ParallelConfig(activation_checkpointing_stack="encoder")
    with pytest.raises(UserError, match="GPT2LMHeadModel names no repeated blocks in its encoder"):
        activation_checkpointing.apply(build("gpt2"), stack)


def test_a_buffer_whose_values_are_lost_is_refused() -> None:
    from t5_fsdp.model.build import restore_buffers

    with torch.device("meta"):
        model = build("conv")
    with pytest.raises(ValueError, match="scale is on the meta device"):
        restore_buffers(model)


def units_by_torch(model: nn.Module, minimum: int) -> list[str]:
    """Names of what FSDP1 itself would wrap by size."""
    from torch.distributed.fsdp.wrap import _recursive_wrap, size_based_auto_wrap_policy

    names = {id(module): name for name, module in model.named_modules()}
    found: set[str] = set()

    def wrap(module: nn.Module, **kwargs: Any) -> nn.Module:
        found.add(names[id(module)])
        return module

    _recursive_wrap(
        model,
        functools.partial(size_based_auto_wrap_policy, min_num_params=minimum),
        wrap,
        ignored_modules=set(),
        ignored_params=set(),
        only_wrap_children=True,
    )
    return [name for name in names.values() if name in found]


@pytest.mark.parametrize("minimum", [1, 300, 700, 2500, 6000, 10**6])
def test_units_by_size_are_those_of_torch(minimum: int) -> None:
    from t5_fsdp.parallel.wrapping import find_units

    # Nothing is shared here, all have a forward, and there is a module of force_leaf_modules.
    net = nn.Transformer(
        d_model=16, nhead=2, num_encoder_layers=2, num_decoder_layers=1, dim_feedforward=40
    )
    options = ParallelConfig(wrap="size", wrap_min_parameters=minimum)
    assert [name for name, _ in find_units(net, options)] == units_by_torch(net, minimum)


def test_what_is_shared_or_used_without_its_forward_is_no_unit() -> None:
    from t5_fsdp.model.build import build_on_meta
    from t5_fsdp.parallel.wrapping import find_units
    from tests.parallel.test_engines import spec

    options = ParallelConfig(wrap="size", wrap_min_parameters=1)
    conv = [name for name, _ in find_units(build("conv"), options)]
    assert conv == ["features.0", "features.1", "head"]  # the list and its layers are not
    for own_head in (False, True):
        names = [name for name, _ in find_units(build_on_meta(spec(own_head)), options)]
        assert "encoder.block.1.layer.0.SelfAttention.q" in names
        stacks = {"shared", "lm_head", "encoder", "decoder", "encoder.embed_tokens"}
        assert not stacks & set(names)


def test_units_that_lie_in_each_other_are_counted_once() -> None:
    from t5_fsdp.model.build import build_on_meta, num_parameters
    from t5_fsdp.parallel.wrapping import describe_units
    from tests.parallel.test_engines import BY_SIZE, spec

    model = build_on_meta(spec(False))
    lines = describe_units(model, ParallelConfig(**BY_SIZE), 2).splitlines()[1:]
    counts = {name: int(count.replace(",", "")) for name, count, _ in map(str.split, lines)}
    assert counts["decoder.block.0"] == 3 * 24  # its norms
    assert counts["decoder.block.0.layer.0.SelfAttention.q"] == 24 * 24
    assert counts["all"] == num_parameters(model) == sum(counts.values()) - counts["all"]
