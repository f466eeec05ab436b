"""Every engine and sharding against plain PyTorch: losses, gradient norms, final weights."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch

from t5_fsdp.config import OptimizerConfig, ParallelConfig
from tests.workers import joined_world

VOCAB = 101  # divides by no number of ranks
NUM_STEPS, ROWS, MICRO_BATCHES, MAX_NORM = 5, 8, 2, 0.5


def spec(own_head: bool) -> Any:
    from transformers import T5Config

    from t5_fsdp.model.build import ModelSpec

    config = T5Config(
        vocab_size=VOCAB, d_model=24, d_kv=6, d_ff=40, num_layers=2, num_heads=4,
        dropout_rate=0.0, decoder_start_token_id=0,
    )  # fmt: skip
    return ModelSpec(config, own_head)


@functools.cache
def rows() -> list[tuple[list[int], list[int]]]:
    """Sources and targets of very different length."""
    generator = torch.Generator().manual_seed(3)

    def ids(length: int) -> list[int]:
        return torch.randint(2, VOCAB, (length,), generator=generator).tolist()

    lengths = [(5, 2), (17, 11), (9, 1), (12, 6), (3, 9), (20, 3), (7, 13), (14, 4)]
    return [(ids(s), ids(t)) for s, t in lengths * NUM_STEPS]


def batch_of(step: int) -> list[tuple[list[int], list[int]]]:
    """The rows of a step; after `NUM_STEPS` they come again."""
    start = step % NUM_STEPS * ROWS
    return rows()[start : start + ROWS]


def make_optimizer(model: torch.nn.Module, name: str, shard: int = 0) -> torch.optim.Optimizer:
    from transformers.optimization import Adafactor as PlainAdafactor

    from t5_fsdp.training import optimizer
    from t5_fsdp.training.adafactor import Adafactor

    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.3)
    if name == "adafactor":
        groups = optimizer.parameter_groups(model, 0.0)
        return Adafactor(groups, lr=1e-2, min_dim_to_factor=2)
    if name == "plain adafactor":
        return PlainAdafactor(model.parameters(), lr=1e-2, relative_step=False)
    moments: Any = {"adamw": "fp32", "adamw bf16": "bf16"}[name]
    options = OptimizerConfig(lr=1e-2, moments_dtype=moments)
    return optimizer.make_optimizer(model, options, seed=1, shard=shard)


@functools.cache
def plain(
    own_head: bool, optimizer_name: str, num_steps: int = NUM_STEPS
) -> tuple[list[float], list[float], dict[str, Any]]:
    """The same steps with transformers and torch alone, one row at a time."""
    from transformers import T5ForConditionalGeneration

    from t5_fsdp.model.build import draw_weights

    described = spec(own_head)
    weights = draw_weights(described, seed=1)
    model = T5ForConditionalGeneration(described.config)
    if own_head:
        model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.shared.weight))
    model.load_state_dict(weights, strict=False)
    losses, norms = plain_steps(model, make_optimizer(model, optimizer_name), num_steps)
    return losses, norms, {name: p.detach().clone() for name, p in model.named_parameters()}


def plain_steps(
    model: Any, optimizer: torch.optim.Optimizer, num_steps: int
) -> tuple[list[float], list[float]]:
    """Losses and gradient norms (before clipping), one row at a time."""
    losses, norms = [], []
    for step in range(num_steps):
        batch = batch_of(step)
        tokens = sum(len(target) for _, target in batch)
        optimizer.zero_grad()
        total = torch.zeros(())
        for source, target in batch:
            logits = model(input_ids=torch.tensor([source]), labels=torch.tensor([target])).logits
            total = total - logits[0].log_softmax(-1)[range(len(target)), target].sum()
        (total / tokens).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
        optimizer.step()
        losses.append(total.item() / tokens)
    return losses, norms


def train(
    parallel: dict[str, Any], own_head: bool, optimizer_name: str, num_steps: int = NUM_STEPS
) -> tuple[list[float], list[float], dict[str, torch.Tensor], dict[str, int]]:
    """On a rank of the pool: the same steps through an engine, in two micro-batches a rank."""
    import numpy as np

    from t5_fsdp.data.collation import SpecialIds, collate
    from t5_fsdp.model.build import build_on_meta, draw_weights
    from t5_fsdp.model.forward import attach_loss
    from t5_fsdp.model.loss import LossOptions
    from t5_fsdp.parallel.engine import check_optimizer, parallelize
    from t5_fsdp.parallel.mesh import shard_index

    described = spec(own_head)
    options = ParallelConfig(**{"param_dtype": "fp32", **parallel})
    with joined_world() as world:
        model = build_on_meta(described)
        attach_loss(model, LossOptions(chunk_rows=7))  # several chunks
        engine = parallelize(model, options, world)
        engine.load_full(draw_weights(described, seed=1) if world.is_main else {})
        optimizer = make_optimizer(engine.model, optimizer_name, shard_index(options, world))
        check_optimizer(optimizer, engine.model)
        losses, norms = [], []
        for step in range(num_steps):
            batch = batch_of(step)
            tokens = sum(len(target) for _, target in batch)
            mine = batch[world.rank :: world.world_size]
            total = 0.0
            for number in range(MICRO_BATCHES):
                # On four ranks some micro-batches are empty: without any real target.
                part = mine[number * 3 : (number + 1) * 3] if number == 0 else mine[3:]
                micro = collate(
                    [np.array(s) for s, _ in part], [np.array(t) for _, t in part], SpecialIds(0, 0)
                )
                with engine.micro_batch(is_last=number == MICRO_BATCHES - 1):
                    objective, cross_entropy = engine.model(**micro.loss_inputs())
                    engine.backward(objective / tokens)
                total += float(cross_entropy)
                if number == 0 or options.engine != "fsdp1":
                    # A validation between two micro-batches changes nothing, nor one between
                    # backward and step (which FSDP1 cannot do).
                    with torch.no_grad():
                        engine.model(**micro.inputs())
                    engine.after_evaluation()
            norms.append(float(engine.clip_grad_norm(MAX_NORM)))
            sizes = local_bytes(engine.model, optimizer)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(world.sum([total])[0] / tokens)
        sizes["moments"] = local_bytes(engine.model, optimizer)["moments"]
        weights = {n: w.clone() for n, w in engine.gather_full(torch.float32).items()}
        del engine, optimizer
    return losses, norms, weights, sizes


def generate_between_steps(parallel: dict[str, Any]) -> list[float]:
    """On a rank of the pool: losses, with summaries of another length on each rank in between."""
    import numpy as np

    from t5_fsdp.data.collation import SpecialIds, collate
    from t5_fsdp.model.build import build_on_meta, build_with_weights, draw_weights
    from t5_fsdp.model.forward import attach_loss
    from t5_fsdp.model.loss import LossOptions
    from t5_fsdp.parallel.engine import parallelize

    described = spec(False)
    options = ParallelConfig(param_dtype="fp32", **parallel)
    with joined_world() as world:
        model = build_on_meta(described)
        attach_loss(model, LossOptions())
        engine = parallelize(model, options, world)
        engine.load_full(draw_weights(described, seed=1) if world.is_main else {})
        optimizer = make_optimizer(engine.model, "adamw")
        losses = []
        for step in range(NUM_STEPS):
            batch = batch_of(step)
            tokens = sum(len(target) for _, target in batch)
            mine = batch[world.rank :: world.world_size]
            micro = collate(
                [np.array(s) for s, _ in mine], [np.array(t) for _, t in mine], SpecialIds(0, 0)
            )
            with engine.micro_batch(is_last=True):
                objective, cross_entropy = engine.model(**micro.loss_inputs())
                engine.backward(objective / tokens)
            engine.clip_grad_norm(0.5)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(world.sum([float(cross_entropy)])[0] / tokens)
            whole = build_with_weights(described, engine.gather_full(torch.float32))
            for _ in range(1 + world.rank):
                whole.generate(
                    input_ids=micro.input_ids,
                    attention_mask=micro.attention_mask,
                    min_new_tokens=3 + 4 * world.rank,
                    max_new_tokens=3 + 4 * world.rank,
                )
        del model, engine, optimizer, whole
    return losses


@pytest.mark.parametrize("engine", ["fsdp2", "fsdp1", "ddp"])
def test_generation_in_mid_run_changes_no_number(pools: Any, engine: str) -> None:
    losses, _, _ = plain(False, "adamw")
    for found in pools(2).run(generate_between_steps, {"engine": engine}):
        assert found == pytest.approx(losses, rel=1e-5)


def local_bytes(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """What this rank holds of parameters, gradients and moments."""

    def size(tensor: torch.Tensor) -> int:
        local = getattr(tensor, "_local_tensor", tensor)
        return local.numel() * local.element_size()

    parameters = list(model.parameters())
    return {
        "parameters": sum(map(size, parameters)),
        "gradients": sum(size(p.grad) for p in parameters if p.grad is not None),
        "moments": sum(
            size(value)
            for state in optimizer.state.values()
            for name, value in state.items()
            if name != "step"
        ),
    }


BY_SIZE = {"wrap": "size", "wrap_min_parameters": 70}
MODES: list[tuple[int, dict[str, Any]]] = [
    *((ranks, {"engine": "fsdp2"}) for ranks in (1, 2, 4)),
    *((ranks, {"engine": "fsdp2", "sharding": "shard_grad_op"}) for ranks in (2, 4)),
    (4, {"engine": "fsdp2", "sharding": "hybrid_shard", "num_replicas": 2}),
    (4, {"engine": "fsdp2", "reshard_after_forward": 2}),
    (2, {"engine": "fsdp2", "forward_prefetch": 2}),
    (2, {"engine": "fsdp2", "cpu_offload": True}),
    *((ranks, {"engine": "fsdp1"}) for ranks in (1, 2, 4)),
    *((ranks, {"engine": "fsdp1", "sharding": "shard_grad_op"}) for ranks in (2, 4)),
    *((ranks, {"engine": "fsdp1", "sharding": "no_shard"}) for ranks in (1, 2)),
    (4, {"engine": "fsdp1", "sharding": "hybrid_shard", "num_replicas": 2}),
    (2, {"engine": "fsdp1", "backward_prefetch": "post", "forward_prefetch": 1}),
    (2, {"engine": "fsdp1", "backward_prefetch": "none", "limit_all_gathers": False}),
    *((ranks, {"engine": "ddp"}) for ranks in (1, 2, 4)),
    (2, {"engine": "ddp", "sync_every_micro_batch": True}),
    (2, {"engine": "fsdp1", "sync_every_micro_batch": True}),
    (2, {"engine": "fsdp2", "sync_every_micro_batch": True}),
    # With 70, decoder blocks are units for the sake of their norms, round units in them.
    *((ranks, {"engine": e, **BY_SIZE}) for e in ("fsdp2", "fsdp1") for ranks in (1, 2, 4)),
]


def _marks(number: int, options: dict[str, Any], ranks: int, combination: int) -> list[Any]:
    # `make test` alternates: each mode comes once, with recomputation and an own head or without.
    if number % 2 != combination:
        return [pytest.mark.exhaustive]
    # Many small units take their time; two ranks show what there is to see.
    return [pytest.mark.long] if "wrap" in options and ranks != 2 else []


@pytest.mark.parametrize(
    ("world_size", "parallel", "checkpointing", "own_head"),
    [
        pytest.param(
            ranks,
            options,
            *combination,
            id="-".join(map(str, (ranks, *options.values(), *combination))),
            marks=_marks(number, options, ranks, index),
        )
        for number, (ranks, options) in enumerate(MODES)
        for index, combination in enumerate(
            [("none", False), ("full", True), ("none", True), ("full", False)]
        )
    ],
)
def test_an_engine_equals_plain_pytorch(
    pools: Any, world_size: int, parallel: dict[str, Any], checkpointing: str, own_head: bool
) -> None:
    losses, norms, weights = plain(own_head, "adamw")
    options = {**parallel, "activation_checkpointing": checkpointing}
    for found in pools(world_size).run(train, options, own_head, "adamw"):
        assert found[0] == pytest.approx(losses, rel=1e-5)
        assert found[1] == pytest.approx(norms, rel=1e-4)
        assert found[2].keys() == weights.keys()
        for name, weight in weights.items():
            torch.testing.assert_close(found[2][name], weight, rtol=0, atol=1e-4)


@pytest.mark.parametrize("engine", ["fsdp2", "fsdp1", "ddp"])
@pytest.mark.parametrize(
    "options",
    [
        {"activation_checkpointing": "selective"},
        {"activation_checkpointing": "full", "activation_checkpointing_stack": "encoder"},
        {"activation_checkpointing": "full", "activation_checkpointing_every": 2},
    ],
)
def test_partly_recomputed_models_equal_plain_pytorch(
    pools: Any, engine: str, options: dict[str, Any]
) -> None:
    losses, norms, _ = plain(False, "adamw")
    for found in pools(2).run(train, {"engine": engine, **options}, False, "adamw"):
        assert found[0] == pytest.approx(losses, rel=1e-5)
        assert found[1] == pytest.approx(norms, rel=1e-4)


def chosen_blocks(**options: Any) -> list[str]:
    from t5_fsdp.model.build import build_on_meta
    from t5_fsdp.parallel import activation_checkpointing

    described = spec(False)
    described.config.num_layers = described.config.num_decoder_layers = 4
    model = build_on_meta(described)
    activation_checkpointing.apply(model, ParallelConfig(**options))
    wrapped = [n for n, m in model.named_modules() if type(m).__name__ == "CheckpointWrapper"]
    return [name.replace(".block.", "") for name in wrapped]


def test_the_blocks_that_are_recomputed() -> None:
    everything = [f"{stack}{i}" for stack in ("encoder", "decoder") for i in range(4)]
    assert chosen_blocks() == everything
    assert chosen_blocks(activation_checkpointing="none") == []
    assert chosen_blocks(activation_checkpointing_stack="encoder") == everything[:4]
    assert chosen_blocks(activation_checkpointing_every=2) == everything[::2]
    assert chosen_blocks(activation_checkpointing="selective") == everything


def test_the_units_of_sharding_are_told() -> None:
    from t5_fsdp.model.build import build_on_meta, num_parameters
    from t5_fsdp.parallel.wrapping import describe_units

    model = build_on_meta(spec(True))
    header, *lines = describe_units(model, ParallelConfig(), 4).splitlines()
    assert header.split() == ["unit", "parameters", "bytes", "a", "rank"]
    names, counts, sizes = zip(*(line.split() for line in lines), strict=True)
    blocks = [f"{stack}.block.{i}" for stack in ("encoder", "decoder") for i in range(2)]
    assert list(names) == [*blocks, "(root)", "all"]
    numbers = [int(count.replace(",", "")) for count in counts]
    assert numbers[-1] == num_parameters(model) == sum(numbers[:-1])
    # Embedding and head, and the two norms behind the stacks.
    assert numbers[-2] == 2 * VOCAB * 24 + 2 * 24
    assert [int(size.replace(",", "")) for size in sizes] == numbers  # 4 bytes over 4 ranks


@pytest.mark.parametrize("engine", ["fsdp2", "fsdp1", "ddp"])
def test_weights_after_plain_gradient_descent_are_equal_to_rounding(
    pools: Any, engine: str
) -> None:
    losses, _, weights = plain(False, "sgd")
    for found in pools(2).run(train, {"engine": engine}, False, "sgd"):
        assert found[0] == pytest.approx(losses, rel=1e-5)
        for name, weight in weights.items():
            torch.testing.assert_close(found[2][name], weight, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("world_size", "parallel", "share"),
    [
        (2, {"engine": "fsdp2"}, 2),
        (4, {"engine": "fsdp2"}, 4),
        (4, {"engine": "fsdp2", "sharding": "hybrid_shard", "num_replicas": 2}, 2),
        (4, {"engine": "fsdp1"}, 4),
        (2, {"engine": "fsdp1", "sharding": "no_shard"}, 1),
        (2, {"engine": "ddp"}, 1),
    ],
)
def test_bytes_of_a_rank_are_its_share(
    pools: Any, world_size: int, parallel: dict[str, Any], share: int
) -> None:
    _, _, weights = plain(False, "adamw")
    whole = 4 * sum(weight.numel() for weight in weights.values())
    sizes = [found[3] for found in pools(world_size).run(train, parallel, False, "adamw")]
    for name, times in (("parameters", 1), ("gradients", 1), ("moments", 2)):
        # A row of 101 does not divide evenly: the mean of the ranks does.
        mean = sum(size[name] for size in sizes) / world_size
        assert mean == pytest.approx(times * whole / share, rel=0.02), name


@pytest.mark.parametrize(
    "engine",
    ["fsdp2", *(pytest.param(name, marks=pytest.mark.long) for name in ("fsdp1", "ddp"))],
)
def test_bf16_stays_near_float32(pools: Any, engine: str) -> None:
    losses, _, _ = plain(False, "sgd", 50)
    options = {"engine": engine, "param_dtype": "bf16"}
    [found, _] = pools(2).run(train, options, False, "sgd", 50)
    assert found[0] == pytest.approx(losses, rel=0.02)
    assert losses[-1] < 0.9 * losses[0]
    assert not math.isclose(found[0][-1], losses[-1], rel_tol=1e-6)


@pytest.mark.parametrize("engine", ["fsdp2", "fsdp1"])
def test_small_units_compute_in_bf16(pools: Any, engine: str) -> None:
    losses, _, _ = plain(False, "sgd")
    options = {"engine": engine, "param_dtype": "bf16", **BY_SIZE}
    for found in pools(2).run(train, options, False, "sgd"):
        assert found[0] == pytest.approx(losses, rel=0.02)


FOUR = [(9, 1), (20, 17), (4, 3), (15, 8)]  # source and target tokens of four rows


def gradient(per_micro_batch: int) -> dict[str, torch.Tensor]:
    """On a rank of the pool: the gradient of four rows, so many at a time on each rank."""
    import numpy as np
    from torch.distributed.tensor import DTensor

    from t5_fsdp.data.collation import SpecialIds, collate
    from t5_fsdp.model.build import build_on_meta, draw_weights
    from t5_fsdp.model.forward import attach_loss
    from t5_fsdp.model.loss import LossOptions
    from t5_fsdp.parallel.common import clean_name
    from t5_fsdp.parallel.engine import parallelize

    generator = torch.Generator().manual_seed(5)

    def ids(length: int) -> Any:
        return np.array(torch.randint(2, VOCAB, (length,), generator=generator).tolist())

    four = [(ids(source), ids(target)) for source, target in FOUR]
    described = spec(False)
    with joined_world() as world:
        model = build_on_meta(described)
        attach_loss(model, LossOptions())
        engine = parallelize(model, ParallelConfig(param_dtype="fp32"), world)
        engine.load_full(draw_weights(described, seed=1) if world.is_main else {})
        mine = four[world.rank :: world.world_size]
        parts = [mine[i : i + per_micro_batch] for i in range(0, len(mine), per_micro_batch)]
        for number, part in enumerate(parts):
            micro = collate([s for s, _ in part], [t for _, t in part], SpecialIds(0, 0))
            with engine.micro_batch(is_last=number == len(parts) - 1):
                objective, _ = engine.model(**micro.loss_inputs())
                engine.backward(objective / sum(target for _, target in FOUR))
        found = {}
        for name, parameter in engine.model.named_parameters():
            assert isinstance(parameter.grad, DTensor)
            found[clean_name(name)] = parameter.grad.full_tensor().clone()
        del engine
    return found


def test_four_rows_have_one_gradient_however_they_are_dealt(pools: Any) -> None:
    whole = pools(1).run(gradient, 4)[0]
    for world_size, per_micro_batch in ((1, 1), (2, 2), (2, 1), (4, 1)):
        for found in pools(world_size).run(gradient, per_micro_batch):
            for name, expected in whole.items():
                torch.testing.assert_close(found[name], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("engine", ["fsdp2", "fsdp1", "ddp"])
def test_bf16_runs_alone(pools: Any, engine: str) -> None:
    losses, _, _ = plain(False, "adamw")
    [found] = pools(1).run(train, {"engine": engine, "param_dtype": "bf16"}, False, "adamw")
    assert found[0] == pytest.approx(losses, rel=0.02)
