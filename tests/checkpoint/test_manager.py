"""Which checkpoints stay, which one a run goes on from."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from t5_fsdp.checkpoint.format import RunState, _digest_of, check_content, complete_checkpoints
from t5_fsdp.checkpoint.retention import Retention, best_steps, check_room, prune
from t5_fsdp.checkpoint.stored_weights import read_weights
from t5_fsdp.cli.run_folder import find_checkpoint, find_resume
from t5_fsdp.config import CheckpointConfig
from t5_fsdp.errors import UserError
from tests.conftest import read_metrics, tiny_options


def make_state(step: int, scores: dict[str, dict[str, float]] | None = None) -> RunState:
    return RunState(
        step=step,
        model={},
        data_hash="",
        tokenizer_hash="",
        plan={},
        window={},
        scores=scores or {},
        versions={},
        prepared="",
    )


def make_folders(run_dir: Path, complete: list[int], others: tuple[str, ...] = ()) -> None:
    for step in complete:
        folder = run_dir / "checkpoints" / f"step-{step:08d}"
        folder.mkdir(parents=True)
        (folder / "COMPLETE").write_text("{}")
    for name in others:
        (run_dir / "checkpoints" / name).mkdir()


def left(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def prune_after(run_dir: Path, state: RunState, keep_every: int | None = None) -> None:
    kept = Retention(keep_last=2, keep_best=1, best_metric="rouge1", keep_every=keep_every)
    prune(run_dir, kept, state.step, state.scores, pytest.fail)


def test_newest_and_best_stay(tmp_path: Path) -> None:
    make_folders(tmp_path, [100, 200, 300, 400])
    scores = {"100": {"rouge1": math.nan}, "200": {"rouge1": 0.3}, "300": {"rouge1": 0.2}}
    prune_after(tmp_path, make_state(400, scores))
    assert left(tmp_path) == ["step-00000200", "step-00000300", "step-00000400"]


def test_the_one_just_written_stays_though_others_have_later_steps(tmp_path: Path) -> None:
    make_folders(tmp_path, [700, 1000, 1500])
    prune_after(tmp_path, make_state(700))
    assert "step-00000700" in left(tmp_path)


def test_multiples_stay(tmp_path: Path) -> None:
    make_folders(tmp_path, [100, 150, 200, 250, 300, 350])
    prune_after(tmp_path, make_state(350), keep_every=200)
    assert left(tmp_path) == ["step-00000200", "step-00000300", "step-00000350"]


def test_the_room_that_the_kept_ones_need(tmp_path: Path) -> None:
    kept = Retention(keep_last=2, keep_best=1, best_metric="rouge1")
    assert kept.most_at_once(1000, 100, at_others=False) == 4
    assert kept.most_at_once(1000, None, at_others=False) == 1
    assert kept.most_at_once(1000, None, at_others=True) == 4
    every = Retention(keep_last=2, keep_best=1, best_metric="rouge1", keep_every=200)
    assert every.most_at_once(1000, 20, at_others=False) == 9
    assert every.most_at_once(10000, 500, at_others=False) == 4 + 10
    check_room(tmp_path, 4, 1000)
    with pytest.raises(UserError, match=r"4 checkpoints of 1e\+06 GB .* need 4e\+06 GB"):
        check_room(tmp_path, 4, 10**15)


def test_what_interrupted_saves_left_goes_and_what_is_not_ours_stays(tmp_path: Path) -> None:
    others = ("step-00000150", "step-00000100.damaged", "step-00000300", "notes", "step-1.old")
    make_folders(tmp_path, [200], others)
    prune_after(tmp_path, make_state(200))
    # Step 300 has no COMPLETE but may be being written.
    assert left(tmp_path) == ["notes", "step-00000200", "step-00000300", "step-1.old"]


def test_what_is_behind_a_link_is_another_runs(tmp_path: Path) -> None:
    make_folders(tmp_path / "a", [100])
    make_folders(tmp_path / "b", [200, 300, 400])
    (tmp_path / "b/checkpoints/step-00000100").symlink_to(tmp_path / "a/checkpoints/step-00000100")
    prune_after(tmp_path / "b", make_state(400))
    assert (tmp_path / "a/checkpoints/step-00000100/COMPLETE").exists()
    assert left(tmp_path / "b") == ["step-00000100", "step-00000300", "step-00000400"]


def test_one_that_cannot_be_deleted_spares_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_folders(tmp_path, [100, 200, 300, 400], ("step-00000150", "step-000000250"))
    unlink, said = Path.unlink, []

    def refuse(path: Path, missing_ok: bool = False) -> None:
        if path.parent.name == "step-00000100":
            raise PermissionError(1, "Operation not permitted", str(path))
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", refuse)
    kept = Retention(keep_last=1, keep_best=0, best_metric="loss")
    prune(tmp_path, kept, 400, {}, said.append)
    # Nine digits are nobody's of ours.
    assert set(left(tmp_path)) == {"step-00000100", "step-000000250", "step-00000400"}
    assert len(said) == 1 and "step-00000100" in said[0]


def test_best_is_never_not_a_number_and_the_earliest_of_equals() -> None:
    scores = {"1": {"loss": math.nan}, "2": {"loss": 2.0}, "3": {"loss": 1.0}, "4": {"loss": 1.0}}
    assert best_steps(scores, "loss", None) == [3, 4, 2]


@pytest.fixture
def run(pools: Any, corpus: Path, tmp_path: Path) -> Any:
    """Train to a step, with a checkpoint every two; returns (code, output, errors)."""

    def train(name: str, max_steps: int, **overrides: Any) -> tuple[int, str, str]:
        options = {"train.max_steps": max_steps, "checkpoint.every_steps": 2} | overrides
        options |= {"checkpoint.keep_last": 9, "evaluation.max_examples": 2}
        return pools(1).command("train", tiny_options(corpus, tmp_path / name, **options))

    return train


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x40
    path.write_bytes(bytes(content))


def empty(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


@pytest.mark.parametrize(
    ("file", "damage"),
    [("__0_0.distcp", flip), ("COMPLETE", empty)],
)
def test_a_damaged_newest_checkpoint_is_passed_over_and_made_again(
    run: Any, tmp_path: Path, file: str, damage: Any
) -> None:
    assert run("run", 4)[0] == 0
    newest = tmp_path / "run/checkpoints/step-00000004"
    damage(newest / file)
    losses = [row["loss"] for row in read_metrics(tmp_path / "run", "train")]
    code, out, _ = run("run", 4)
    assert code == 0
    assert "step-00000004" in out and "damaged" in out and "(step 2)" in out
    assert [row["loss"] for row in read_metrics(tmp_path / "run", "train")] == losses
    assert left(tmp_path / "run") == ["step-00000002", "step-00000004"]


def remove(path: Path) -> None:
    path.unlink()


def test_every_damage_to_every_file_is_found_and_named(
    pools: Any, corpus: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    options = {"train.max_steps": 4, "checkpoint.every_steps": 2, "evaluation.max_examples": 2}
    code, _, err = pools(2).command("train", tiny_options(corpus, run_dir, **options))
    assert code == 0, err
    newest, before = (run_dir / f"checkpoints/step-{step:08d}" for step in (4, 2))
    files = [str(path.relative_to(newest)) for path in newest.rglob("*") if path.is_file()]
    assert {"__0_0.distcp", "__1_0.distcp", ".metadata", "COMPLETE", "tokenizer/tokenizer.json"} < {
        *files
    }
    for name in files:
        for damage in (flip, cut, remove):
            said: list[str] = []
            content = (newest / name).read_bytes()
            damage(newest / name)
            found = find_resume(run_dir, CheckpointConfig(), said.append)
            (newest / name).write_bytes(content)
            if name == "scores.json":  # the validation after the save; a checkpoint needs none
                assert (found, said) == (newest, [])
            else:
                assert found == before, (name, damage)
                [line] = said
                assert str(newest) in line and name in line, (name, damage, line)
    said = []
    assert find_resume(run_dir, CheckpointConfig(), said.append) == newest and not said


def test_another_format_is_no_damage(run: Any, tmp_path: Path) -> None:
    assert run("run", 4)[0] == 0
    newest = tmp_path / "run/checkpoints/step-00000004"
    marker = json.loads((newest / "COMPLETE").read_text())
    del marker["digest"]
    marker["format_version"] = 9
    marker["digest"] = _digest_of(marker)
    (newest / "COMPLETE").write_text(json.dumps(marker))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    code, _, err = run("run", 6)
    assert code == 2 and "of format 9" in err and str(newest) in err
    assert {path: path.read_bytes() for path in before} == before


def test_a_name_of_another_step_is_passed_over(run: Any, tmp_path: Path) -> None:
    assert run("run", 4)[0] == 0
    folder = tmp_path / "run/checkpoints"
    shutil.copytree(folder / "step-00000002", folder / "step-00000099")
    code, out, _ = run("run", 6)
    assert code == 0 and "(step 4)" in out
    assert "step-00000099 holds the checkpoint of step 2" in out


def test_the_second_best_stands_in_for_a_damaged_best(run: Any, tmp_path: Path) -> None:
    assert run("run", 6, **{"evaluation.every_steps": 2, "optimizer.lr": 0})[0] == 0
    run_dir = tmp_path / "run"
    assert find_checkpoint(run_dir, "", "loss").name == "step-00000002"  # of equals the earliest
    flip(run_dir / "checkpoints/step-00000002/__0_0.distcp")
    said: list[str] = []
    assert find_checkpoint(run_dir, "", "loss", said.append).name == "step-00000004"
    assert len(said) == 1 and "step-00000002" in said[0] and "damaged" in said[0]


def test_resume_from_a_folder_branches_off_and_goes_on_from_its_own(
    run: Any, tmp_path: Path
) -> None:
    assert run("first", 4)[0] == 0
    start = tmp_path / "first/checkpoints/step-00000002"
    code, _, err = run("first", 6, **{"checkpoint.resume": start})
    assert code == 2 and "later checkpoints" in err and "step-00000004" in err
    branch = {"checkpoint.resume": start}
    code, out, _ = run("second", 4, **branch)
    assert code == 0 and "(step 2)" in out
    code, out, _ = run("second", 6, **branch)
    assert code == 0 and "step-00000004 (step 4)" in out


def test_options_of_the_optimizer_are_the_configured_ones(run: Any, tmp_path: Path) -> None:
    assert run("run", 2)[0] == 0
    start = {"checkpoint.resume": tmp_path / "run/checkpoints/step-00000002"}
    losses = {}
    for decay in ("0.0", "5.0"):
        assert run(f"decay-{decay}", 6, **start, **{"optimizer.weight_decay": decay})[0] == 0
        losses[decay] = read_metrics(tmp_path / f"decay-{decay}", "train")[-1]["loss"]
    assert abs(losses["0.0"] - losses["5.0"]) > 1e-3


def test_a_validation_that_was_left_out_is_made_up_for(run: Any, tmp_path: Path) -> None:
    assert run("run", 2)[0] == 0
    [before] = read_metrics(tmp_path / "run", "validation")
    # As a machine leaves it that was taken away during the last step's validation.
    (tmp_path / "run/checkpoints/step-00000002/scores.json").unlink()
    metrics = tmp_path / "run/metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    kept = [json.dumps(row) for row in rows if row["kind"] != "validation"]
    metrics.write_text("\n".join(kept) + "\n")
    assert run("run", 2)[0] == 0
    [again] = read_metrics(tmp_path / "run", "validation")
    assert again["loss"] == before["loss"] and again["step"] == 2
    code, out, _ = run("run", 2)
    assert code == 0 and "nothing to do" in out
    assert json.loads((tmp_path / "run/status.json").read_text())["state"] == "finished"


@pytest.mark.parametrize("content", ["", "x", "[]", "5", "null", '{"10": 5}', '{"x": {}}'])
def test_scores_that_are_no_good_are_left_out(run: Any, tmp_path: Path, content: str) -> None:
    from t5_fsdp.checkpoint.format import read_state

    assert run("run", 2)[0] == 0
    checkpoint = tmp_path / "run/checkpoints/step-00000002"
    assert "2" in read_state(checkpoint).scores
    (checkpoint / "scores.json").write_text(content)
    assert read_state(checkpoint).scores == {}


def test_a_failed_resume_changes_nothing(run: Any, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    assert run("run", 2)[0] == 0
    flip(run_dir / "checkpoints/step-00000002/__0_0.distcp")
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    code, _, err = run("run", 4)
    assert code == 2 and err.startswith("error: all checkpoints of")
    after = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    assert after == before


def test_saving_beside_training_is_saving(pools: Any, corpus: Path, tmp_path: Path) -> None:
    runs = {}
    for beside in ("true", "false"):
        run_dir = tmp_path / beside
        options = {"train.max_steps": 6, "checkpoint.every_steps": 1, "checkpoint.keep_last": 9}
        argv = tiny_options(corpus, run_dir, **options, **{"checkpoint.async_save": beside})
        code, _, err = pools(2).command("train", argv)
        assert code == 0, err
        rows = read_metrics(run_dir, "checkpoint")
        assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
        waited = [row["blocked_seconds"] for row in rows]
        total = [row["total_seconds"] for row in rows]
        assert all(
            w < t if beside == "true" else w == t for w, t in zip(waited, total, strict=True)
        )
        runs[beside] = [read_weights(path) for path in complete_checkpoints(run_dir)]
    # What was copied is what the weights were, though the optimizer went on meanwhile.
    for one, other in zip(runs["true"], runs["false"], strict=True):
        assert all(torch.equal(one[name], other[name]) for name in other)


def lose_files_of_step(argv: list[str], step: int) -> Any:
    """On a rank of the pool: train, while the checkpoint of a step can't be finished."""
    from t5_fsdp.checkpoint import manager
    from tests.workers import run_command

    write = manager.write_complete

    def fail(folder: Path, names: list[str], saved_step: int, *rest: Any) -> int:
        if saved_step == step:
            raise OSError(28, "No space left on device", str(folder))
        return write(folder, names, saved_step, *rest)

    manager.write_complete = fail  # type: ignore[assignment]
    try:
        return run_command("train", argv)
    finally:
        manager.write_complete = write


def lose_scores(argv: list[str]) -> Any:
    """On a rank of the pool: train, while no scores can be written beside a checkpoint."""
    from t5_fsdp.checkpoint import manager
    from tests.workers import run_command

    write = manager.write_json

    def fail(path: Path, value: Any) -> None:
        raise OSError(28, "No space left on device", str(path))

    manager.write_json = fail  # type: ignore[assignment]
    try:
        return run_command("train", argv)
    finally:
        manager.write_json = write


def test_what_fails_after_complete_does_not_cost_the_checkpoint(
    pools: Any, corpus: Path, tmp_path: Path
) -> None:
    options = {"train.max_steps": 4, "checkpoint.every_steps": 2, "evaluation.every_steps": 2}
    argv = tiny_options(corpus, tmp_path / "run", **options)
    pools(2).run(lose_scores, argv)
    for folder in complete_checkpoints(tmp_path / "run"):
        assert check_content(folder)
    assert "step-00000002" in left(tmp_path / "run")


def test_a_save_that_fails_beside_training_is_told_soon(
    pools: Any, corpus: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    options = {"train.max_steps": 400, "checkpoint.every_steps": 4, "logging.every_steps": 1}
    argv = tiny_options(corpus, run_dir, **options)
    results = pools(2).run(lose_files_of_step, argv, 8)
    assert [code for code, _, _ in results] == [2, 2]
    err = "".join(err for _, _, err in results)
    assert err.startswith("error: ") and "No space left" in err and len(err.splitlines()) == 1
    # Not first at the next save or at the end, and what was sound stays.
    assert len(read_metrics(run_dir, "train")) < 50
    assert left(run_dir) == ["step-00000004"]
    status = json.loads((run_dir / "status.json").read_text())
    assert status["state"] == "failed" and status["checkpoint"].endswith("step-00000004")


def test_minutes_between_checkpoints(pools: Any, corpus: Path, tmp_path: Path) -> None:
    options = {"checkpoint.every_minutes": 1e-6, "checkpoint.keep_last": 9, "train.max_steps": 4}
    code, _, err = pools(2).command("train", tiny_options(corpus, tmp_path / "run", **options))
    assert code == 0, err
    assert [row["step"] for row in read_metrics(tmp_path / "run", "checkpoint")] == [1, 2, 3, 4]
