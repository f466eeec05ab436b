"""The plan command: what it prints and writes, and what it refuses."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT, tiny_options

RECIPE = ["--config", str(ROOT / "configs/wikihow_t5_3b.yaml")]
PER_RANK = ("parameters", "gradients", "optimizer_state", "activations", "peak")


def plan(pools: Any, *argv: Any) -> tuple[int, str, str]:
    return pools(1).command("plan", ["--simulate", "false", *argv])


def test_a_recipe_is_planned_without_anything_at_hand(pools: Any, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    code, out, err = plan(
        pools, *RECIPE, "--world_size", 8, "--device_memory_gib", 40, "--json", file,
        "--price_per_hour", 20, "--run_dir", tmp_path / "runs/x",
    )  # fmt: skip
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines()[:-1])) <= 80
    assert "2,851,598,336 parameters, 8 x a100-40 on 1 node" in out and "fits: " in out
    found = json.loads(file.read_text())
    assert {f"{name}_bytes" for name in PER_RANK} < set(found) and found["fits"]
    assert found["parameters_bytes"] == pytest.approx(4 * 2_851_598_336 / 8, rel=0.001)
    assert found["optimizer_state_bytes"] == pytest.approx(2_851_598_336, rel=0.001)
    # 157,252 articles in batches of 128, three times.
    assert found["num_examples"] == 157_252 and found["steps"] == 3687
    assert found["hours"] == pytest.approx(3687 * found["step_seconds"] / 3600)
    assert found["dollars"] == pytest.approx(20 * found["hours"])
    assert found["communication_between_nodes_bytes"] == 0 and found["method"] == "closed form"
    assert not (tmp_path / "runs").exists()


def test_a_device_without_bf16_is_said(pools: Any, tmp_path: Path) -> None:
    seconds = {}
    for dtype in ("bf16", "fp16", "fp32"):
        file = tmp_path / f"{dtype}.json"
        argv = ["--config", ROOT / "configs/wikihow_t5_small.yaml", "--world_size", 1]
        argv += ["--device", "t4", "--parallel.param_dtype", dtype, "--json", file]
        code, out, err = plan(pools, *argv)
        assert (code, err) == (0, "")
        assert ("T4 has no bf16 of its own" in out) == (dtype == "bf16")
        seconds[dtype] = json.loads(file.read_text())["compute_seconds"]
    assert seconds["bf16"] == seconds["fp32"] == pytest.approx(seconds["fp16"] * 65 / 8.1)


def test_what_does_not_fit_is_said_with_what_would(pools: Any, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    argv = [*RECIPE, "--model.name", "google-t5/t5-11b", "--json", file]
    argv += ["--parallel.sync_every_micro_batch", "false"]
    code, out, err = plan(pools, *argv)
    assert (code, err) == (0, "")
    assert "does not fit: " in out and "parallel.sync_every_micro_batch: true" in out
    found = json.loads(file.read_text())
    assert not found["fits"] and found["changes_that_fit"]


def test_no_more_examples_are_planned_than_a_run_uses(pools: Any, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    argv = [*RECIPE, "--json", file, "--run_dir", tmp_path / "run", "--price_per_hour", 30]
    known = [*argv, "--data.source", "sample"]
    cases = [
        (known, 5000, "5,000 examples (the bundled sample)"),
        ([*argv, "--num_examples", 4000], 4000, "4,000 examples (as given)"),
        ([*argv, "--data.max_train_examples", 300], 300, "(data.max_train_examples)"),
        ([*known, "--num_examples", 4000, "--data.max_train_examples", 300], 300,
         "300 examples (data.max_train_examples)"),
    ]  # fmt: skip
    for options, count, words in cases:
        code, out, err = plan(pools, *options)
        found = json.loads(file.read_text())
        assert (code, err, found["num_examples"]) == (0, "", count)
        assert words in " ".join(out.split())
        assert f"${found['dollars']:.2f} at $30" in " ".join(out.split())


def test_two_nodes_and_a_sweep(pools: Any, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    argv = [*RECIPE, "--world_size", 16, "--sweep", "true", "--json", file]
    code, out, err = plan(pools, *argv, "--device", "a100-80", "--train.max_steps", 100)
    assert (code, err) == (0, "")
    assert "on 2 nodes" in out and "settings fit, the fastest" in out
    found = json.loads(file.read_text())
    assert found["communication_between_nodes_bytes"] > 1e9 and found["steps"] == 100
    seconds = [row["step_seconds"] for row in found["sweep"]]
    assert seconds == sorted(seconds) and len(seconds) > 10


def test_both_ways_of_counting_stand_side_by_side(corpus: Path, tmp_path: Path) -> None:
    """In a process of its own: the pool's workers, as daemons, may have no children."""
    # A cache of its own too: what other tests have prepared would be planned for.
    argv = tiny_options(corpus, tmp_path / "run", **{"data.cache_dir": tmp_path / "cache"})
    program = [sys.executable, str(ROOT / "scripts/plan.py"), *map(str, argv)]
    program += ["--world_size", "4", "--json", str(tmp_path / "plan.json")]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "closed form     simulated" in done.stdout and "simulated in" in done.stdout
    found = json.loads((tmp_path / "plan.json").read_text())
    assert found["method"] == "simulation"
    for name in PER_RANK[:-1]:
        ours, theirs = (found[way][f"{name}_bytes"] for way in ("closed_form", "simulated"))
        assert ours == pytest.approx(theirs, rel=0.05), name
        assert theirs == found[f"{name}_bytes"]


def test_prepared_data_gives_lengths_and_number(pools: Any, corpus: Path, tmp_path: Path) -> None:
    argv = tiny_options(corpus, tmp_path / "run")
    file = tmp_path / "plan.json"
    first, second = ["--world_size", 2, "--json", file], ["--source_tokens", 30]
    options = [*argv, "--data.cache_dir", tmp_path / "cache"]
    code, out, err = plan(pools, *options, *first)
    assert (code, err) == (0, "") and "assumed" in out and "run: 10 steps take" in out
    code, out, err = plan(pools, *options, *first, "--train.max_steps", "null")
    assert (code, err) == (0, "") and "run prepare_data first, or" in " ".join(out.split())
    code, _, err = pools(1).command("prepare_data", options)
    assert code == 0, err
    code, out, err = plan(pools, *options, *first)
    found = json.loads(file.read_text())
    assert "mean of the prepared data" in out and found["num_examples"] == 60
    assert 10 < found["mean_source_tokens"] < 64
    code, out, err = plan(pools, *options, *first, *second, "--num_examples", 1000)
    found = json.loads(file.read_text())
    assert (found["mean_source_tokens"], found["num_examples"]) == (30, 1000)


def test_a_model_from_a_folder_and_a_checkpoint(pools: Any, trained: Path, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    checkpoint = next((trained / "checkpoints").iterdir())
    argv = [*RECIPE, "--world_size", 2, "--json", file, "--device", "cpu"]
    argv += ["--device_memory_gib", 8]
    code, _, err = plan(pools, *argv, "--model.name", checkpoint)
    assert (code, err) == (0, "")
    found = json.loads(file.read_text())
    from t5_fsdp.checkpoint.format import read_state
    from t5_fsdp.model.build import build_on_meta, num_parameters

    assert found["num_parameters"] == num_parameters(build_on_meta(read_state(checkpoint).spec))
    assert "step_seconds" not in found and found["fits"]
    (tmp_path / "model").mkdir()
    config = {"model_type": "t5", "d_model": 32, "vocab_size": 256, "num_layers": 1}
    (tmp_path / "model/config.json").write_text(json.dumps(config))
    code, _, err = plan(pools, *argv, "--model.name", tmp_path / "model")
    assert (code, err) == (0, "")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--world_size", 0], "--world_size is 0"),
        (["--world_size", 2**21], "from 1 to 1,048,576"),
        (["--json", "/proc/plan.json"], "--json /proc/plan.json can't be written"),
        (["--json", ROOT], "is a folder; give a file"),
        (["--json", ""], "is a folder; give a file"),
        (["--world_size", 12], "no multiple of --devices_per_node 8"),
        (["--device", "v100"], "--device is 'v100'"),
        (["--device_memory_gib", -1], "--device_memory_gib is -1.0"),
        (["--model.name", "someone/else"], "google-t5/t5-small"),
        (["--train.micro_batch_tokens", 500], "raise it to 662"),
        (["--parallel.sharding", "hybrid_shard"], "one replica is parallel.sharding: full_shard"),
        (["--parallel.sharding", "hybrid_shard"], "--world_size 8, 1 node: is that your run's?"),
        (["--device", "cpu", "--sweep", "true"], "--sweep is true, but a CPU's speed is not known"),
        (["--device", "cpu", "--price_per_hour", 3], "--price_per_hour is 3.0, but a CPU's speed"),
        (["--source_tokens", 0], "--source_tokens is 0; give a mean from 1"),
        (["--target_tokens", 151], "data.max_target_tokens, 150"),
    ],
)
def test_bad_input_is_one_line(pools: Any, argv: list[Any], message: str) -> None:
    code, _, err = plan(pools, *RECIPE, *argv)
    assert code == 2 and message in err, err
    assert len(err.splitlines()) == 1 and "Traceback" not in err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[1, 2]", "holds no configuration but a list"),
        ('{"model_type": "bert"}', "no encoder and decoder"),
        ('{"model_type": "led", "vocab_size": 500, "d_model": 64}', "makes no working model"),
        ('{"model_type": "prophetnet", "vocab_size": 500}', "makes no working model"),
    ],
)
def test_models_that_are_none_are_one_line(
    pools: Any, tmp_path: Path, content: str, message: str
) -> None:
    (tmp_path / "config.json").write_text(content)
    code, _, err = plan(pools, *RECIPE, "--model.name", tmp_path)
    assert code == 2 and message in err and len(err.splitlines()) == 1, err


def test_a_full_disk_is_one_line(pools: Any, tmp_path: Path) -> None:
    """Through a link: a program that replaces what it should write to would break the machine."""
    file = tmp_path / "full"
    file.symlink_to("/dev/full")
    code, _, err = plan(pools, *RECIPE, "--json", file)
    assert code == 2 and f"{file} can't be read or written (No space left" in err, err
    assert len(err.splitlines()) == 1 and file.is_symlink()


def test_it_is_one_process() -> None:
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    address = {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    program = [sys.executable, str(ROOT / "scripts/plan.py"), *RECIPE]
    done = subprocess.run(
        program, cwd=ROOT, capture_output=True, text=True, env=os.environ | ranks | address
    )
    assert done.returncode == 2 and done.stderr.startswith("error: plan runs as one process")


def test_a_validation_and_what_is_not_counted_are_said(pools: Any, tmp_path: Path) -> None:
    recipe = ["--config", ROOT / "configs/wikihow_t5_11b.yaml", "--json", tmp_path / "plan.json"]
    recipe += ["--parallel.activation_checkpointing", "full"]
    code, out, err = plan(pools, *recipe)
    assert (code, err) == (0, "") and "so the weights stay" in out
    # The weights in bf16, beside those of the state; and the batch's caches.
    assert json.loads((tmp_path / "plan.json").read_text())["validation_bytes"] > (
        (2 + 12 / 8) * 11_307_321_344
    )
    code, out, _ = plan(pools, *recipe, "--evaluation.generation_mode", "gather")
    assert "does not fit; set evaluation.generation_mode" in " ".join(out.split())
    code, out, _ = plan(pools, *recipe[:1], ROOT / "configs/wikihow_t5_base.yaml",
                        "--parallel.engine", "ddp")  # fmt: skip
    assert f"beside {16 * 222_903_552 / 2**30:.1f} GiB of" in " ".join(out.split())
    code, out, _ = plan(pools, *recipe, "--device", "h200")
    assert "optimizer state: fits" in " ".join(out.split())
    code, out, _ = plan(pools, *RECIPE, "--parallel.cpu_offload", "true")
    assert "warning: the step takes longer: parallel.cpu_offload" in out
    assert max(map(len, out.splitlines())) <= 80


def test_train_says_and_refuses_by_the_estimate(pools: Any, corpus: Path, tmp_path: Path) -> None:
    argv = [*tiny_options(corpus, tmp_path / "run"), "--check", "true"]
    code, out, err = pools(1).command("train", argv)
    assert code == 0 and re.search(r"memory of a rank, estimated: [1-9][.\d]* MiB", out), err
    [message] = pools(1).run(refused, argv[:-2], 2**18)
    assert "does not fit: weights, gradients and optimizer state alone need" in message
    assert "of 0.2 MiB, its part of this host's memory" in message
    assert pools(1).run(refused, argv[:-2], 2**26) == [""]


def test_a_cpu_run_is_refused_by_the_memory_of_its_host(
    pools: Any, corpus: Path, tmp_path: Path
) -> None:
    large = {"model.config": '{"d_model": 16384, "d_ff": 16777216, "num_layers": 1}'}  # 18 TB
    argv = tiny_options(corpus, tmp_path / "run", **large)
    code, _, err = pools(2).command("train", argv)
    assert code == 2 and err.startswith("error: the run does not fit: weights, gradients and")
    assert "its part of this host's memory" in err and "--check_memory false" in err
    assert not (tmp_path / "run/checkpoints").exists()


def refused(argv: list[str], device_bytes: int) -> str:
    """On a rank of the pool: what a run is refused with on a host of so much memory."""
    from t5_fsdp.cli.memory_check import refuse_what_cannot_fit
    from t5_fsdp.cli.options import parse_layers, resolve
    from t5_fsdp.cli.prepare_data import prepare_on_all_ranks
    from t5_fsdp.console import Console
    from t5_fsdp.errors import UserError
    from t5_fsdp.planning.planned_model import planned_spec
    from tests.workers import joined_world

    config = resolve(parse_layers(argv, command="train", description=""))
    with joined_world() as world:
        prepared = prepare_on_all_ranks(config, world, Console(False))
        try:
            refuse_what_cannot_fit(
                config, world, planned_spec(config.model), prepared, device_bytes
            )
        except UserError as error:
            return str(error)
    return ""


def test_every_device_is_a_value_of_the_option_and_a_row_of_the_page() -> None:
    from typing import get_args

    from t5_fsdp.cli.plan import OWN_OPTIONS
    from t5_fsdp.model.devices import DEVICES

    [option] = [extra for extra in OWN_OPTIONS if extra.name == "device"]
    assert get_args(option.type) == (*DEVICES, "cpu")
    page = (ROOT / "docs/planning.md").read_text(encoding="utf-8")
    for name, device in DEVICES.items():
        row = next(line for line in page.splitlines() if line.startswith(f"| `{name}` |"))
        cells = [cell.strip() for cell in row.split("|")[1:-1]]
        assert cells[2] == f"{device.memory_bytes / 2**30:.1f} GiB".replace(".0 ", " "), row
        assert cells[3] == f"{device.memory_bandwidth / 1e9:,.0f}"
        assert cells[4].split()[1] == f"{device.link_bandwidth / 1e9:.0f}"
        assert cells[5] == device.node
        assert float(cells[6].split()[0]) == pytest.approx(device.node_bandwidth / 1e9, abs=0.05)
