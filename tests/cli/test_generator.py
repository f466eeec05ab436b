"""Where summaries are generated, and when that is refused."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from t5_fsdp.config import Config, ParallelConfig
from t5_fsdp.config_problems import validation_problems
from tests.conftest import tiny_options
from tests.evaluation.test_generation import tiny_model
from tests.workers import joined_world


@pytest.mark.parametrize(
    ("options", "setting"),
    [
        ({"engine": "ddp"}, "engine: ddp"),
        ({"engine": "fsdp1", "sharding": "no_shard"}, "sharding: no_shard"),
        ({"engine": "fsdp1", "sharding": "shard_grad_op"}, "sharding: shard_grad_op"),
        ({"sharding": "shard_grad_op"}, "sharding: shard_grad_op"),
        ({"reshard_after_forward": False}, "reshard_after_forward: false"),
        ({}, None),
        ({"engine": "fsdp1", "sharding": "hybrid_shard"}, None),
        ({"reshard_after_forward": 2}, None),
    ],
)
def test_sharded_validation_that_would_save_nothing_is_refused(
    options: dict[str, Any], setting: str | None
) -> None:
    config = Config(run_dir="run", parallel=ParallelConfig(**options))
    assert validation_problems(config.evaluation, config.parallel) == []
    config.evaluation.generation_mode = "sharded"
    problems = validation_problems(config.evaluation, config.parallel)
    assert len(problems) == (setting is not None)
    assert all(f"with parallel.{setting}, " in problem for problem in problems)


def test_training_refuses_it_before_it_writes(pools: Any, corpus: Path, tmp_path: Path) -> None:
    options = {"parallel.engine": "ddp", "evaluation.generation_mode": "sharded"}
    code, _, err = pools(1).command("train", tiny_options(corpus, tmp_path / "run", **options))
    assert code == 2 and len(err.splitlines()) == 1 and "parallel.engine: ddp" in err
    assert not (tmp_path / "run/config.yaml").exists()


def choose(parallel: dict[str, Any], free_bytes: list[int], in_training: bool) -> tuple[bool, str]:
    """On a rank of the pool: what auto comes to where so many bytes are free, and what is said."""
    from t5_fsdp.cli.generator import generates_sharded
    from t5_fsdp.console import Console
    from t5_fsdp.model import devices
    from t5_fsdp.model.build import ModelSpec, build_on_meta
    from t5_fsdp.parallel.engine import parallelize

    spec = ModelSpec(tiny_model().config, own_head=True)
    config = Config(run_dir="run", parallel=ParallelConfig(**parallel))
    config.evaluation.batch_tokens = config.evaluation.num_beams = 1
    config.evaluation.max_new_tokens = config.data.max_source_tokens = 1
    out = io.StringIO()
    with joined_world() as world:
        engine = None
        if in_training:
            engine = parallelize(build_on_meta(spec), config.parallel, world)
            engine.materialize()
        with (
            mock.patch.object(devices, "free_memory_bytes", lambda *_: free_bytes[world.rank]),
            contextlib.redirect_stdout(out),
        ):
            chosen = generates_sharded(spec, config, world, Console(world.is_main), engine)
        del engine
    return chosen, out.getvalue()


def test_auto_shards_where_one_rank_is_short(pools: Any) -> None:
    from t5_fsdp.model.build import ModelSpec, build_on_meta, num_parameters

    count = num_parameters(build_on_meta(ModelSpec(tiny_model().config, own_head=True)))
    plenty, little = 7 * count, 5 * count  # bf16: 2 bytes a weight, and little for a batch of one
    scarce = count

    def chosen(parallel: dict[str, Any], *free: int, in_training: bool = True) -> bool:
        results = pools(2).run(choose, parallel, list(free), in_training)
        [(first, said), (second, silent)] = results
        assert first == second and not silent
        assert ("the weights stay sharded" in said and " GB a rank " in said) == first
        return first

    assert not chosen({}, little, little)
    assert chosen({}, little, scarce) and chosen({}, scarce, little)
    # FSDP1 gathers in float32 and casts then.
    fsdp1 = {"engine": "fsdp1"}
    assert chosen(fsdp1, plenty, little) and not chosen(fsdp1, plenty, plenty)
    assert not chosen(fsdp1, little, little, in_training=False)
    # What each rank has whole anyway is gathered.
    assert not chosen({"sharding": "shard_grad_op"}, scarce, scarce)
    assert chosen({"sharding": "shard_grad_op"}, scarce, scarce, in_training=False)
    assert chosen({"engine": "ddp"}, scarce, scarce, in_training=False)


def open_twice() -> list[Any]:
    """On a rank of the pool: the function behind `generate`, opened once and again."""
    from t5_fsdp.model.build import ModelSpec, build_on_meta
    from t5_fsdp.parallel.engine import parallelize

    spec = ModelSpec(tiny_model().config, own_head=True)
    with joined_world() as world:
        engine = parallelize(build_on_meta(spec), ParallelConfig(), world)
        engine.materialize()
        found = []
        for _ in range(2):
            with engine.sharded_generation() as model:
                found.append(id(model.generate.__func__))
        own = id(type(model).generate)
        del model, engine
    return [*found, own]


def test_generate_is_wrapped_once_however_often_it_is_validated(pools: Any) -> None:
    [(first, second, own)] = pools(1).run(open_twice)
    assert first == second != own
