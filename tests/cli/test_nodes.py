"""Several nodes, stood in for by groups of ranks with folders of their own."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import make_pairs, tiny_options, write_jsonl
from tests.workers import COLLECTIVE_TIMEOUT_SECONDS


def on_two_nodes(argvs: list[list[str]]) -> tuple[str, str]:
    """On a rank of a pool of four: prepare with the options of its node; (folder, problem)."""
    from t5_fsdp.cli.options import parse_layers, resolve
    from t5_fsdp.cli.prepare_data import prepare_on_all_ranks
    from t5_fsdp.cli.starting_point import find_start
    from t5_fsdp.console import Console
    from t5_fsdp.distributed import enter_world, read_launch
    from t5_fsdp.errors import PeerFailed, UserError

    launch = read_launch()
    node, local_rank = divmod(launch.rank, 2)
    world = enter_world(dataclasses.replace(launch, local_rank=local_rank, local_world_size=2))
    layers = parse_layers(argvs[node], command="train", description="", config_required=True)
    config = resolve(layers)
    prepared = prepare_on_all_ranks(config, world, Console(False))
    problem = ""
    try:
        find_start(config, world, prepared, None)
    except (UserError, PeerFailed) as error:
        problem = str(error)
    world.connect(COLLECTIVE_TIMEOUT_SECONDS)
    world.disconnect()
    return str(prepared.directory), problem


@pytest.mark.parametrize("shared", [True, False])
def test_nodes_prepare_their_own_where_they_share_no_cache(
    pools: Any, corpus: Path, tmp_path: Path, shared: bool
) -> None:
    caches = [tmp_path / ("both" if shared else f"node-{node}") for node in range(2)]
    argvs = [tiny_options(corpus, tmp_path / "run", **{"data.cache_dir": c}) for c in caches]
    results = pools(4).run(on_two_nodes, argvs)
    assert [Path(folder).parent for folder, _ in results] == [c for c in caches for _ in range(2)]
    assert [problem for _, problem in results] == [""] * 4
    assert not list(tmp_path.glob("*/.probe-*"))


def test_a_node_with_other_data_is_told(pools: Any, corpus: Path, tmp_path: Path) -> None:
    other = write_jsonl(tmp_path / "train.jsonl", make_pairs(60, 99))
    argvs = [
        tiny_options(corpus, tmp_path / "run", **{"data.cache_dir": tmp_path / f"node-{node}"})
        for node in range(2)
    ]
    argvs[1] += ["--data.train_files", str(other)]
    problems = [problem for _, problem in pools(4).run(on_two_nodes, argvs)]
    assert problems[:2] == ["", ""]
    assert all("other training data" in problem for problem in problems[2:])
