"""Optimizers on sharded parameters: Adafactor's means are the whole matrix's; bytes of a rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.parallel.test_engines import plain, train

ADAFACTOR_MODES: list[tuple[int, dict[str, Any]]] = [
    *((ranks, {"engine": "fsdp2"}) for ranks in (1, 2, 4)),
    (4, {"engine": "fsdp2", "sharding": "hybrid_shard", "num_replicas": 2}),
    (2, {"engine": "fsdp2", "cpu_offload": True}),
    (2, {"engine": "fsdp1", "sharding": "no_shard"}),
    (2, {"engine": "ddp"}),
]


@pytest.mark.parametrize(
    ("world_size", "parallel"),
    ADAFACTOR_MODES,
    ids=["-".join(map(str, (r, *o.values()))) for r, o in ADAFACTOR_MODES],
)
def test_adafactor_equals_transformers_on_one_process(
    pools: Any, world_size: int, parallel: dict[str, Any]
) -> None:
    losses, norms, weights = plain(True, "plain adafactor")
    for found in pools(world_size).run(train, parallel, True, "adafactor"):
        assert found[0] == pytest.approx(losses, rel=1e-5)
        assert found[1] == pytest.approx(norms, rel=1e-4)
        for name, weight in weights.items():
            torch.testing.assert_close(found[2][name], weight, rtol=0, atol=1e-5, msg=name)


@pytest.mark.parametrize(
    ("world_size", "parallel", "share"),
    [
        (2, {"engine": "fsdp2"}, 2),
        (4, {"engine": "fsdp2", "sharding": "hybrid_shard", "num_replicas": 2}, 2),
        (2, {"engine": "fsdp1"}, 2),
        (2, {"engine": "ddp"}, 1),
    ],
)
def test_bf16_moments_take_half_the_bytes(
    pools: Any, world_size: int, parallel: dict[str, Any], share: int
) -> None:
    losses, _, weights = plain(True, "adamw")
    results = pools(world_size).run(train, parallel, True, "adamw bf16")
    whole = 4 * sum(weight.numel() for weight in weights.values())
    # A row of 101 does not divide evenly: the mean of the ranks does.
    mean = sum(found[3]["moments"] for found in results) / world_size
    assert mean == pytest.approx(whole / share, rel=0.02)
    for found in results:
        assert found[0] == pytest.approx(losses, rel=2e-3)
        # Ranks that hold the same shard round alike: `gather_full` reads one replica or the other.
        for name, weight in found[2].items():
            assert torch.equal(weight, results[0][2][name]), name


def test_adafactor_takes_a_few_bytes_a_parameter(pools: Any) -> None:
    _, _, weights = plain(True, "adamw")
    for found in pools(2).run(train, {"engine": "fsdp2"}, True, "adafactor"):
        matrices = [tuple(w.shape) for w in weights.values() if w.dim() == 2]
        vectors = [w.numel() for w in weights.values() if w.dim() == 1]
        whole = sum(-(-rows // 2) + columns for rows, columns in matrices) + sum(vectors) // 2
        assert found[3]["moments"] == pytest.approx(4 * whole, rel=0.02)
