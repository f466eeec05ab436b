"""The recipes in configs/: they load, keep apart, and say how to launch them."""

from __future__ import annotations

from pathlib import Path

import pytest

from t5_fsdp.cli.options import Layers, dump_yaml, parse_layers, resolve
from t5_fsdp.config import Config

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "configs").glob("*.yaml"))
DEMO = "demo.yaml"

each_recipe = pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)


def layers_of(path: Path) -> Layers:
    return parse_layers(
        ["--config", str(path)], command="train", description="Train a T5.", config_required=True
    )


def config_of(path: Path) -> Config:
    return resolve(layers_of(path))


def test_the_promised_recipes_are_there() -> None:
    sizes = ("small", "base", "large", "3b", "11b")
    promised = {DEMO, *(f"wikihow_t5_{size}.yaml" for size in sizes)}
    assert promised <= {path.name for path in RECIPES}


@each_recipe
def test_a_recipe_has_no_problem(path: Path) -> None:
    config = config_of(path)
    longest = config.data.max_source_tokens + config.data.max_target_tokens
    assert longest <= config.train.micro_batch_tokens


@each_recipe
def test_a_printed_recipe_reads_back_equal(path: Path, tmp_path: Path) -> None:
    config = config_of(path)
    printed = tmp_path / "printed.yaml"
    printed.write_text(dump_yaml(config), encoding="utf-8")
    assert config_of(printed) == config


@each_recipe
def test_the_launch_line_stands_on_top(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    head = [line for line in lines[:6] if line.startswith("#")]
    assert any(f"scripts/train.py --config configs/{path.name}" in line for line in head)
    if path.name != DEMO:
        assert any(f"make train CONFIG=configs/{path.name}" in line for line in head)


def test_each_recipe_names_a_run_dir_of_its_own() -> None:
    named = {path.name: layers_of(path).files.get("run_dir") for path in RECIPES}
    recipes = {name: run_dir for name, run_dir in named.items() if name != DEMO}
    assert None not in recipes.values()
    assert len(set(named.values())) == len(named)
    assert Config().run_dir not in named.values()
