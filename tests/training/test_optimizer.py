"""Update rules against torch's and transformers', groups without decay, the learning rate."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from t5_fsdp.config import OptimizerConfig, ParallelConfig, ScheduleConfig
from t5_fsdp.parallel.common import local_part
from t5_fsdp.training.adafactor import Adafactor
from t5_fsdp.training.adamw import LowPrecisionMomentsAdamW, stochastic_round
from t5_fsdp.training.optimizer import (
    learning_rate,
    make_optimizer,
    parameter_groups,
    take_step,
)
from tests.workers import joined_world


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]),
        ("cosine", [0.5, 1.0, 1.0, 0.853553, 0.5, 0.146447]),
        ("inverse_sqrt", [0.5, 1.0, 0.816497, 0.707107, 0.632456, 0.57735]),
    ],
)
def test_rates_of_six_steps_with_two_of_warm_up(name: str, expected: list[float]) -> None:
    options = ScheduleConfig(name=name, warmup_steps=2)  # type: ignore[arg-type]
    rates = [learning_rate(step, 6, 1.0, options) for step in range(1, 7)]
    assert rates == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("warmup", [0, 1, 7])
@pytest.mark.parametrize("name", ["constant", "linear", "cosine", "inverse_sqrt"])
def test_rates_equal_those_of_transformers(name: str, warmup: int) -> None:
    import transformers

    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.3)
    make: dict[str, Callable[[], Any]] = {
        "constant": lambda: transformers.get_constant_schedule_with_warmup(optimizer, warmup),
        "linear": lambda: transformers.get_linear_schedule_with_warmup(optimizer, warmup, 40),
        "cosine": lambda: transformers.get_cosine_schedule_with_warmup(optimizer, warmup, 40),
        "inverse_sqrt": lambda: transformers.get_inverse_sqrt_schedule(
            optimizer, warmup, max(warmup, 1)
        ),
    }
    scheduler = make[name]()
    theirs = []
    for _ in range(41):
        theirs.append(scheduler.get_last_lr()[0])
        optimizer.step()  # without it the scheduler warns
        scheduler.step()
    options = ScheduleConfig(name=name, warmup_steps=warmup)  # type: ignore[arg-type]
    ours = [learning_rate(step, 40, 0.3, options) for step in range(1, 41)]
    # Their first step, number 0, has rate 0 when there is warm-up; ours is number 1. What falls
    # towards the end is counted from the last step in both.
    is_shifted = name == "inverse_sqrt" and warmup > 0
    for step in range(1, 41):
        in_warm_up = step <= warmup
        expected = theirs[step if in_warm_up or is_shifted else step - 1]
        assert ours[step - 1] == pytest.approx(expected, rel=1e-6), step


def tiny_model(family: str) -> Any:
    """A model of a family with names of its own for norms and biases."""
    import transformers

    sizes: dict[str, dict[str, Any]] = {
        "T5": {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2},
        "MT5": {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2},
        "Bart": {"d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 8,
                 "decoder_ffn_dim": 8, "encoder_attention_heads": 2, "decoder_attention_heads": 2},
        "Pegasus": {"d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 8,
                    "decoder_ffn_dim": 8, "encoder_attention_heads": 2,
                    "decoder_attention_heads": 2},
        "Bert": {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
                 "intermediate_size": 8},
        "GPT2": {"n_embd": 8, "n_layer": 1, "n_head": 2},
    }  # fmt: skip
    heads = {"Bert": "BertForMaskedLM", "GPT2": "GPT2LMHeadModel"}
    config = getattr(transformers, f"{family}Config")(vocab_size=16, **sizes[family])
    name = heads.get(family, f"{family}ForConditionalGeneration")
    return getattr(transformers, name)(config)


@pytest.mark.parametrize("family", ["T5", "MT5", "Bart", "Pegasus", "Bert", "GPT2"])
def test_matrices_are_decayed_and_nothing_else(family: str) -> None:
    model = tiny_model(family)
    decayed, others = parameter_groups(model, 0.5)
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.5, 0.0)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = [names[id(parameter)] for parameter in others["params"]]
    expected = [
        name
        for name, parameter in model.named_parameters()
        if parameter.dim() < 2 or "relative_attention_bias" in name
    ]
    assert found == expected
    # Pegasus' sinusoidal positions are parameters that are never trained.
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert sorted(found + [names[id(p)] for p in decayed["params"]]) == sorted(trained)


def groups_of(parallel: dict[str, Any]) -> list[list[str]]:
    """On a rank of the pool: the names in the groups of a sharded model."""
    from t5_fsdp.model.build import build_on_meta
    from t5_fsdp.parallel.common import clean_name
    from t5_fsdp.parallel.engine import parallelize
    from tests.parallel.test_engines import spec

    with joined_world() as world:
        engine = parallelize(build_on_meta(spec(True)), ParallelConfig(**parallel), world)
        engine.materialize()
        names = {id(p): clean_name(name) for name, p in engine.model.named_parameters()}
        groups = parameter_groups(engine.model, 0.5)
        found = [[names[id(parameter)] for parameter in group["params"]] for group in groups]
        del engine, groups
    return found


@pytest.mark.parametrize("engine", ["fsdp2", "fsdp1", "ddp"])
def test_sharded_parameters_fall_into_the_same_groups(pools: Any, engine: str) -> None:
    from t5_fsdp.model.build import build_on_meta
    from tests.parallel.test_engines import spec

    names = [name for name, _ in build_on_meta(spec(True)).named_parameters()]
    others = [n for n in names if "layer_norm" in n or "relative_attention_bias" in n]
    decayed = [name for name in names if name not in others]
    for found in pools(2).run(groups_of, {"engine": engine}):
        assert found == [decayed, others]


def test_what_is_frozen_is_left_out() -> None:
    model = tiny_model("T5")
    model.requires_grad_(False)
    model.shared.weight.requires_grad_(True)
    [group] = make_optimizer(model, OptimizerConfig(weight_decay=0.5)).param_groups
    assert group["params"] == [model.shared.weight] and group["weight_decay"] == 0.5


def test_norms_and_position_biases_are_not_decayed() -> None:
    for name in ("adamw", "adafactor"):
        model = tiny_model("T5")
        before = {name: value.detach().clone() for name, value in model.named_parameters()}
        options = OptimizerConfig(name=name, lr=0.1, weight_decay=0.5)  # type: ignore[arg-type]
        optimizer = make_optimizer(model, options)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        for name, value in model.named_parameters():
            kept = "layer_norm" in name or "relative_attention_bias" in name
            expected = before[name] if kept else 0.95 * before[name]
            torch.testing.assert_close(value.detach(), expected)


def regress(
    make: Callable[[nn.Module], torch.optim.Optimizer], steps: int
) -> tuple[list[float], nn.Module]:
    """Losses of a small regression that learns, and its model."""
    generator = torch.Generator().manual_seed(5)
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(24, 101), nn.Tanh(), nn.LayerNorm(101), nn.Linear(101, 7))
    teacher = nn.Linear(24, 7)
    optimizer = make(model)
    losses = []
    for _ in range(steps):
        inputs = torch.randn(32, 24, generator=generator)
        loss = (model(inputs) - teacher(inputs).detach()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model


def ours(dtype: torch.dtype, model: nn.Module) -> torch.optim.Optimizer:
    return LowPrecisionMomentsAdamW(
        model.parameters(), 1e-2, seed=1, shard=0, weight_decay=0.1, moments_dtype=dtype
    )


def test_adamw_with_float32_moments_equals_torchs() -> None:
    losses, model = regress(functools.partial(ours, torch.float32), 100)
    theirs, plain = regress(
        lambda m: torch.optim.AdamW(m.parameters(), 1e-2, weight_decay=0.1), 100
    )
    assert losses == pytest.approx(theirs, rel=1e-5)
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_adamw_with_bf16_moments_learns_as_well() -> None:
    exact, _ = regress(functools.partial(ours, torch.float32), 200)
    rounded, _ = regress(functools.partial(ours, torch.bfloat16), 200)
    assert rounded != exact
    assert sum(exact[-20:]) < 0.1 * sum(exact[:20])
    assert sum(rounded[-20:]) == pytest.approx(sum(exact[-20:]), rel=0.03)


def test_rounding_is_right_in_the_mean_and_keeps_what_bf16_holds() -> None:
    generator = torch.Generator().manual_seed(1)
    values = torch.tensor([1.0, 1.001, -1.003, 3e-9, 0.0, -2.5e-30, 1e30])
    drawn = torch.stack([stochastic_round(values, generator) for _ in range(20_000)]).double()
    torch.testing.assert_close(drawn.mean(0), values.double(), rtol=2e-4, atol=0)
    assert all(len(set(column.tolist())) <= 2 for column in drawn.T)
    assert (drawn[:, 0] == 1).all() and (drawn[:, 4] == 0).all()


def second_moment(nearest: bool) -> float:
    """After 2,000 steps with gradient 1, by rounding to the nearest bfloat16 or at random."""
    parameter = nn.Parameter(torch.zeros(1000))
    parameter.grad = torch.ones_like(parameter)
    optimizer = LowPrecisionMomentsAdamW(
        [parameter], 0.0, seed=1, shard=0,
        moments_dtype=torch.float32 if nearest else torch.bfloat16,
    )  # fmt: skip
    for _ in range(2000):
        optimizer.step()
        if nearest:
            square = optimizer.state[parameter]["exp_avg_sq"]
            square.copy_(square.bfloat16())
    return float(optimizer.state[parameter]["exp_avg_sq"].float().mean())


def test_plain_rounding_freezes_the_second_moment_and_ours_does_not() -> None:
    exact = 1 - 0.999**2000  # 0.865
    assert second_moment(nearest=False) == pytest.approx(exact, rel=0.01)
    assert second_moment(nearest=True) < 0.3


def test_rounding_depends_on_seed_step_and_shard_and_leaves_dropout_alone() -> None:
    def moments(seed: int, shard: int, steps: int = 3) -> list[torch.Tensor]:
        parameters = [nn.Parameter(torch.zeros(500)), nn.Parameter(torch.zeros(500))]
        optimizer = LowPrecisionMomentsAdamW(parameters, 1e-3, seed=seed, shard=shard)
        for _ in range(steps):
            for parameter in parameters:
                parameter.grad = torch.full_like(parameter, 0.3)
            optimizer.step()
        return [optimizer.state[parameter]["exp_avg"] for parameter in parameters]

    before = torch.get_rng_state()
    first, second = moments(1, 0)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(moments(1, 0)[0], first)
    assert not torch.equal(first, second)
    assert not torch.equal(moments(2, 0)[0], first)
    assert not torch.equal(moments(1, 1)[0], first)


def test_rounding_goes_on_after_a_load_as_without_it() -> None:
    def weights(*, loads: bool) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1)
        parameter = nn.Parameter(torch.zeros(500))
        optimizer = LowPrecisionMomentsAdamW([parameter], 0.1, seed=1, shard=0)
        for step in range(6):
            if loads and step == 3:
                state = optimizer.state_dict()
                optimizer = LowPrecisionMomentsAdamW([parameter], 0.1, seed=1, shard=0)
                optimizer.load_state_dict(state)
            parameter.grad = torch.randn(500, generator=generator)
            optimizer.step()
        return parameter.detach()

    assert torch.equal(weights(loads=True), weights(loads=False))


def test_adafactor_equals_that_of_transformers() -> None:
    from transformers.optimization import Adafactor as TheirAdafactor

    def our_adafactor(model: nn.Module) -> torch.optim.Optimizer:
        return Adafactor(model.parameters(), 3e-2, min_dim_to_factor=2)

    losses, model = regress(our_adafactor, 100)
    theirs, plain = regress(
        lambda m: TheirAdafactor(m.parameters(), lr=3e-2, relative_step=False), 100
    )
    assert losses == pytest.approx(theirs, rel=1e-4)
    assert sum(losses[-10:]) < 0.2 * sum(losses[:10])
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_adafactor_factors_large_matrices_only() -> None:
    model = nn.ParameterList(
        [nn.Parameter(torch.ones(shape)) for shape in [(128, 130), (127, 130)]]
    )
    optimizer = make_optimizer(model, OptimizerConfig(name="adafactor"))
    for parameter in model:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    shapes = [{n: tuple(v.shape) for n, v in optimizer.state[p].items()} for p in model]
    assert shapes[0] == {"step": (), "row": (128,), "column": (130,)}
    assert shapes[1] == {"step": (), "square": (127, 130)}
    # A row without any gradient, such as a piece that never occurs, changes nothing and no number.
    assert all(bool((parameter == 1).all()) for parameter in model)


OPTIMIZERS = [
    {"name": "adamw"},
    {"name": "adamw", "moments_dtype": "bf16"},
    {"name": "adafactor"},
]


def skip_in_the_middle(parallel: dict[str, Any], options: dict[str, Any]) -> list[Any]:
    """On a rank of the pool: whether a skipped step leaves weights, moments and what follows."""
    from t5_fsdp.model.build import build_on_meta, draw_weights
    from t5_fsdp.parallel.engine import parallelize
    from tests.parallel.test_engines import spec

    def train(world: Any, skipped: set[int]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        engine = parallelize(build_on_meta(spec(True)), ParallelConfig(**parallel), world)
        engine.load_full(draw_weights(spec(True), 1) if world.is_main else {})
        optimizer = make_optimizer(
            engine.model, OptimizerConfig(weight_decay=0.1, **options), seed=1
        )
        generator = torch.Generator().manual_seed(world.rank)
        good = 0
        for index in range(3 + len(skipped)):
            good += index not in skipped
            for parameter in engine.model.parameters():
                parameter.grad = torch.full_like(parameter, float("nan"))
                if index not in skipped:
                    gradient = local_part(parameter.grad)
                    gradient.copy_(torch.randn(gradient.shape, generator=generator))
            # The number says how bf16 moments are rounded: it has to be the same in both runs.
            is_skipped = torch.tensor(float(index in skipped))
            take_step(optimizer, number=good, rate=0.1, is_skipped=is_skipped)
        weights = [local_part(p.detach()).clone() for p in engine.model.parameters()]
        states = [
            local_part(value).clone() for state in optimizer.state.values()
            for value in state.values()
        ]  # fmt: skip
        return weights, states

    with joined_world() as world:
        whole, broken = train(world, set()), train(world, {0, 2})
    return [
        all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
        for one, other in zip(whole, broken, strict=True)
    ]


@pytest.mark.parametrize(
    ("engine", "options"),
    [
        (engine, options)
        for engine in ("fsdp2", "fsdp1", "ddp")
        for options in OPTIMIZERS
        # It factors whole rows, which FSDP1 does not keep.
        if (engine, options["name"]) != ("fsdp1", "adafactor")
    ],
)
def test_a_skipped_step_changes_nothing(pools: Any, engine: str, options: dict[str, Any]) -> None:
    parallel = {"engine": engine, "param_dtype": "fp32"}
    for same_weights, same_states in pools(2).run(skip_in_the_middle, parallel, options):
        assert same_weights and same_states
