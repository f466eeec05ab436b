"""LoRA under every engine against plain peft on one process."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from t5_fsdp.config import ModelConfig, OptimizerConfig, ParallelConfig
from tests.parallel.test_engines import (
    BY_SIZE,
    MAX_NORM,
    NUM_STEPS,
    batch_of,
    local_bytes,
    plain_steps,
    spec,
)
from tests.workers import joined_world

RANK, ALPHA, RATE = 4, 12.0, 1e-2


def lora_spec(own_head: bool, dropout: float = 0.0, targets: Any = "all-linear") -> Any:
    from t5_fsdp.model.adapter import choose_adapter
    from t5_fsdp.model.build import build_on_meta

    described = spec(own_head)
    options = ModelConfig(
        adapter="lora",
        lora_rank=RANK,
        lora_alpha=ALPHA,
        lora_dropout=dropout,
        lora_targets=targets,
    )
    described.adapter = choose_adapter(options, build_on_meta(described))
    return described


def first_weights(described: Any) -> Any:
    from t5_fsdp.model.build import draw_weights, fit_adapter

    return fit_adapter(draw_weights(described, seed=1), None, described, seed=1)


def make_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    from t5_fsdp.training import optimizer

    return optimizer.make_optimizer(model, OptimizerConfig(lr=RATE))


def plain_model(own_head: bool, targets: Any = "all-linear") -> Any:
    """With transformers and peft alone, our first weights in it."""
    from peft import LoraConfig, get_peft_model
    from transformers import T5ForConditionalGeneration

    from t5_fsdp.model.build import draw_weights

    # A configuration of its own: one that a model was built with names that model's attention.
    model = T5ForConditionalGeneration(spec(own_head).config)
    if own_head:
        model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.shared.weight))
    model.load_state_dict(draw_weights(spec(own_head), seed=1), strict=False)
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=targets, lora_dropout=0.0)
    adapted = get_peft_model(model, config)
    drawn = first_weights(lora_spec(own_head))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_A" in name:
                parameter.copy_(drawn[name])
    return adapted


@functools.cache
def plain(
    own_head: bool, targets: Any = "all-linear"
) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Losses, gradient norms and final weights, one row at a time."""
    model = plain_model(own_head, targets)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, weight_decay=0.0)
    losses, norms = plain_steps(model, optimizer, NUM_STEPS)
    inner = model.base_model.model
    return losses, norms, {name: p.detach().clone() for name, p in inner.named_parameters()}


def train(
    parallel: dict[str, Any],
    own_head: bool,
    dropout: float = 0.0,
    targets: Any = "all-linear",
) -> dict[str, Any]:
    """On a rank of the pool: the same steps through an engine, in two micro-batches a rank."""
    import numpy as np

    from t5_fsdp.data.collation import SpecialIds, collate
    from t5_fsdp.model.build import build_on_meta
    from t5_fsdp.model.forward import attach_loss
    from t5_fsdp.model.loss import LossOptions
    from t5_fsdp.parallel.engine import check_optimizer, parallelize
    from t5_fsdp.seeding import seed_torch

    described = lora_spec(own_head, dropout, targets)
    options = ParallelConfig(**{"param_dtype": "fp32", **parallel})
    with joined_world() as world:
        model = build_on_meta(described)
        attach_loss(model, LossOptions(chunk_rows=7))
        engine = parallelize(model, options, world)
        engine.load_full(first_weights(described) if world.is_main else {})
        optimizer = make_optimizer(engine.model)
        check_optimizer(optimizer, engine.model)
        losses, norms = [], []
        for step in range(NUM_STEPS):
            seed_torch(1, "dropout", step, world.rank)
            engine.model.train()
            batch = batch_of(step)
            tokens = sum(len(target) for _, target in batch)
            mine = batch[world.rank :: world.world_size]
            total = 0.0
            for number, part in enumerate((mine[:3], mine[3:])):
                micro = collate(
                    [np.array(s) for s, _ in part], [np.array(t) for _, t in part], SpecialIds(0, 0)
                )
                with engine.micro_batch(is_last=number == 1):
                    objective, cross_entropy = engine.model(**micro.loss_inputs())
                    engine.backward(objective / tokens)
                total += float(cross_entropy)
            norms.append(float(engine.clip_grad_norm(MAX_NORM)))
            sizes = {**local_bytes(engine.model, optimizer), "buffers": gradient_buffers(engine)}
            optimizer.step()
            optimizer.zero_grad()
            losses.append(world.sum([total])[0] / tokens)
        sizes["moments"] = local_bytes(engine.model, optimizer)["moments"]
        weights = {n: w.clone() for n, w in engine.gather_full(torch.float32).items()}
        del engine, optimizer
    return {"losses": losses, "norms": norms, "weights": weights, "sizes": sizes}


LONG_FSDP1, LONG_DDP = (pytest.param(e, marks=pytest.mark.long) for e in ("fsdp1", "ddp"))
NONE, FULL = {"activation_checkpointing": "none"}, {"activation_checkpointing": "full"}
HYBRID = {"sharding": "hybrid_shard", "num_replicas": 2}
COMPILED = {"compile": True, "compile_backend": "eager"}  # test_compilation has more


def gradient_buffers(engine: Any) -> int:
    """Bytes of the memory that this rank's gradients lie in: FSDP1's are parts of a larger one."""
    found = {}
    for parameter in engine.model.parameters():
        if parameter.grad is not None:
            local = getattr(parameter.grad, "_local_tensor", parameter.grad)
            storage = local.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


MODES: list[tuple[int, dict[str, Any], bool]] = [
    *((1, {"engine": engine, **NONE}, False) for engine in ("fsdp1", "ddp")),
    *((2, {"engine": engine, **FULL}, True) for engine in ("fsdp2", "fsdp1", "ddp")),
    (2, {"engine": "fsdp1", "sharding": "no_shard", **NONE}, False),
    (4, {"engine": "fsdp1", **HYBRID, **FULL}, False),
]
MORE_MODES: list[tuple[int, dict[str, Any], bool]] = [
    (4, {"engine": "fsdp2", **HYBRID, **FULL}, False),
    (2, {"engine": "fsdp2", **NONE}, False),
    *((2, {"engine": e, "sharding": "shard_grad_op", **FULL}, False) for e in ("fsdp1", "fsdp2")),
    (4, {"engine": "fsdp1", **FULL}, True),
    (2, {"engine": "fsdp2", **BY_SIZE, **FULL}, False),
    (1, {"engine": "fsdp2", **COMPILED, **FULL}, False),
    (2, {"engine": "fsdp2", "cpu_offload": True, "forward_prefetch": 1, **FULL}, False),
]
OTHER_MODES: list[tuple[int, dict[str, Any], bool]] = [
    (1, {"engine": "fsdp2", **NONE}, False),
    (1, {"engine": "ddp", **COMPILED, **FULL}, False),
    *((1, {"engine": engine, **FULL}, True) for engine in ("fsdp2", "fsdp1", "ddp")),
    *((2, {"engine": engine, **NONE}, False) for engine in ("fsdp1", "ddp")),
    (2, {"engine": "fsdp1", "sharding": "no_shard", **FULL}, True),
    (2, {"engine": "fsdp1", **BY_SIZE, **FULL}, False),
]


def num_shards(world_size: int, parallel: dict[str, Any]) -> int:
    if parallel["engine"] == "ddp" or parallel.get("sharding") == "no_shard":
        return 1
    return world_size // parallel.get("num_replicas", 1)


def check_sizes(ranks: list[dict[str, int]], weights: dict[str, torch.Tensor], share: int) -> None:
    """Gradients and moments are those of the pairs alone, spread like the parameters."""
    whole = 4 * sum(weight.numel() for weight in weights.values())
    pairs = 4 * sum(weight.numel() for name, weight in weights.items() if "lora_" in name)
    closed_form = {"parameters": whole, "gradients": pairs, "buffers": pairs, "moments": 2 * pairs}
    for name, wanted in closed_form.items():
        mean = sum(sizes[name] for sizes in ranks) / len(ranks)
        assert mean == pytest.approx(wanted / share, rel=0.02), name


@pytest.mark.parametrize(
    ("world_size", "parallel", "own_head"),
    [
        *MODES,
        *(pytest.param(*mode, marks=pytest.mark.long) for mode in MORE_MODES),
        *(pytest.param(*mode, marks=pytest.mark.exhaustive) for mode in OTHER_MODES),
    ],
    ids=["-".join(map(str, (r, *o.values()))) for r, o, _ in MODES + MORE_MODES + OTHER_MODES],
)
def test_an_engine_equals_plain_peft(
    pools: Any, world_size: int, parallel: dict[str, Any], own_head: bool
) -> None:
    losses, norms, weights = plain(own_head)
    first = first_weights(lora_spec(own_head))
    ranks = pools(world_size).run(train, parallel, own_head)
    check_sizes([found["sizes"] for found in ranks], weights, num_shards(world_size, parallel))
    for found in ranks:
        assert found["losses"] == pytest.approx(losses, rel=1e-5)
        assert found["norms"] == pytest.approx(norms, rel=1e-4)
        assert found["weights"].keys() == weights.keys() == set(first)
        for name, weight in weights.items():
            if "lora_" in name:
                torch.testing.assert_close(found["weights"][name], weight, rtol=0, atol=1e-4)
                assert not torch.equal(found["weights"][name], first[name])
            else:
                assert torch.equal(found["weights"][name], first[name])


@pytest.mark.parametrize("engine", ["fsdp2", LONG_FSDP1, LONG_DDP])
def test_an_adapter_of_the_decoder_alone_leaves_the_encoder_out(pools: Any, engine: str) -> None:
    targets = ["EncDecAttention.q", "EncDecAttention.v"]
    losses, norms, _ = plain(False, tuple(targets))
    for found in pools(2).run(train, {"engine": engine}, False, 0.0, targets):
        assert found["losses"] == pytest.approx(losses, rel=1e-5)
        assert found["norms"] == pytest.approx(norms, rel=1e-4)
        pairs = {name for name in found["weights"] if "lora_" in name}
        assert len(pairs) == 8 and all("EncDecAttention" in name for name in pairs)


def test_the_units_of_sharding_are_told() -> None:
    from t5_fsdp.model.build import build_on_meta
    from t5_fsdp.parallel.wrapping import describe_units, find_trained_parts

    model = build_on_meta(lora_spec(False, targets=["q"]))
    header, *lines = describe_units(model, ParallelConfig(), 2).splitlines()
    assert header.split() == ["unit", "parameters", "bytes", "a", "rank", "trained"]
    counts = {
        line.split()[0]: [int(n.replace(",", "")) for n in line.split()[1:]] for line in lines
    }
    # Rank 4 beside one q of 24 x 24 in the encoder's blocks, two in the decoder's.
    assert counts["encoder.block.1"][2] == 4 * 48 and counts["decoder.block.0"][2] == 2 * 4 * 48
    assert counts["(root)"][2] == 0 and counts["all"][2] == 6 * 4 * 48
    assert counts["all"][0] == sum(p.numel() for p in model.parameters())
    assert counts["all"][1] == 2 * counts["all"][0]
    assert len(find_trained_parts(model, ParallelConfig())) == 2 * 6


@pytest.mark.parametrize("engine", ["fsdp2", "fsdp1", LONG_DDP])
def test_bf16_stays_near_float32(pools: Any, engine: str) -> None:
    losses, _, _ = plain(False)
    options = {"engine": engine, "param_dtype": "bf16"}
    [found, _] = pools(2).run(train, options, False)
    assert found["losses"] == pytest.approx(losses, rel=0.02)
    assert found["losses"][-1] != pytest.approx(losses[-1], rel=1e-6)


@pytest.mark.parametrize(
    ("engine", "checkpointing"),
    [
        ("fsdp2", "full"),
        pytest.param("fsdp1", "selective", marks=pytest.mark.long),
        pytest.param("ddp", "full", marks=pytest.mark.long),
        pytest.param("fsdp1", "full", marks=pytest.mark.exhaustive),
        pytest.param("ddp", "selective", marks=pytest.mark.exhaustive),
        pytest.param("fsdp2", "selective", marks=pytest.mark.exhaustive),
    ],
)
def test_dropout_before_the_pairs_is_recomputed_alike(
    pools: Any, engine: str, checkpointing: str
) -> None:
    runs = [
        pools(2).run(train, {"engine": engine, "activation_checkpointing": kind}, False, 0.2)[0]
        for kind in ("none", checkpointing)
    ]
    assert runs[1]["losses"] == pytest.approx(runs[0]["losses"], rel=1e-6)
    assert runs[1]["norms"] == pytest.approx(runs[0]["norms"], rel=1e-5)
    assert runs[0]["losses"][-1] != pytest.approx(plain(False)[0][-1], rel=1e-5)
