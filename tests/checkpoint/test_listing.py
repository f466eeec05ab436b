"""`python -m t5_fsdp.checkpoint`: what there is, what is sound, which is best and which is next."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from t5_fsdp.checkpoint.__main__ import main
from tests.conftest import ROOT
from tests.launch import run
from tests.run_folders import make_checkpoint

SCORES = {
    "100": {"loss": 0.5, "rougeLsum": 0.2},
    "200": {"loss": 0.25, "rougeLsum": 0.25},
    "300": {"loss": 0.75, "rougeLsum": float("nan")},
}


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run with five folders: two sound ones, a cut one, an interrupted one, one moved aside."""
    for step in (100, 200, 300, 400):
        known = {name: values for name, values in SCORES.items() if int(name) <= step}
        folder = make_checkpoint(tmp_path, step, known)
        if step == 400:
            (folder / "__0_0.distcp").write_bytes(b"cut")
    (tmp_path / "checkpoints/step-00000500").mkdir()
    (tmp_path / "checkpoints/step-00000400.damaged").mkdir()
    (tmp_path / "checkpoints/notes").mkdir()
    return tmp_path


def listed(capsys: Any, *argv: Any) -> dict[str, Any]:
    assert main([*map(str, argv), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_what_may_be_sound_is_not_called_damaged(run_dir: Path, capsys: Any) -> None:
    folder = make_checkpoint(run_dir, 600, {})
    marker = json.loads((folder / "COMPLETE").read_text())
    marker.pop("digest")
    (folder / "COMPLETE").write_text(json.dumps(marker | {"format_version": 99}))
    last = listed(capsys, run_dir)["checkpoints"][-1]
    assert (last["step"], last["status"]) == (600, "not readable")
    assert "is a checkpoint of format 99" in last["problem"]
    # Nor is it passed over when a run goes on.
    assert not any(row["is_next"] for row in listed(capsys, run_dir)["checkpoints"])


def test_a_pipe_or_a_deep_file_does_not_stop_the_list(run_dir: Path, capsys: Any) -> None:
    os.mkfifo(run_dir / "checkpoints/step-00000100/scores.json")
    (run_dir / "checkpoints/step-00000200/scores.json").write_text("[" * 100_000)
    (run_dir / "checkpoints/step-00000300/COMPLETE").write_text("[" * 100_000)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.alarm(20)
    try:
        states = [row["status"] for row in listed(capsys, run_dir)["checkpoints"]]
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert states[:3] == ["complete", "complete", "damaged"]


def test_a_run_may_be_called_like_a_checkpoint(tmp_path: Path, capsys: Any) -> None:
    run_dir = tmp_path / "step-00000007"
    make_checkpoint(run_dir, 100, {})
    assert [row["step"] for row in listed(capsys, run_dir)["checkpoints"]] == [100]
    assert [row["step"] for row in listed(capsys, run_dir / "checkpoints/step-00000100")[
        "checkpoints"]] == [100]  # fmt: skip


def test_state_scores_best_and_next(run_dir: Path, capsys: Any) -> None:
    found = listed(capsys, run_dir)
    rows = [(row["step"], row["status"], row["is_best"], row["is_next"])
            for row in found["checkpoints"]]  # fmt: skip
    assert rows == [
        (100, "complete", False, False),
        (200, "complete", True, False),
        (300, "complete", False, True),
        (400, "damaged", False, False),
        (400, "moved aside", False, False),
        (500, "incomplete", False, False),
    ]
    assert found["best_metric"] == "loss" and found["verified"] is False
    assert found["checkpoints"][0]["scores"] == SCORES["100"]
    assert found["checkpoints"][2]["scores"] == {"loss": 0.75, "rougeLsum": None}
    assert "__0_0.distcp should have 2000000 bytes and is 3" in found["checkpoints"][3]["problem"]
    assert found["checkpoints"][0]["num_bytes"] > 2_000_000
    assert 0 <= found["checkpoints"][0]["age_seconds"] < 600
    again = listed(capsys, run_dir / "checkpoints")
    assert [row["status"] for row in again["checkpoints"]] == [row[1] for row in rows]


def test_the_best_and_the_next_are_those_that_the_commands_take(run_dir: Path, capsys: Any) -> None:
    from t5_fsdp.checkpoint.format import complete_checkpoints
    from t5_fsdp.checkpoint.retention import best_steps

    marked = {name: row["path"] for row in listed(capsys, run_dir)["checkpoints"]
              for name in ("is_best", "is_next") if row[name]}  # fmt: skip
    assert best_steps(SCORES, "loss", complete_checkpoints(run_dir))[0] == 200
    assert marked["is_best"].endswith("step-00000200")
    # What is newest by its number but damaged is passed over.
    assert marked["is_next"].endswith("step-00000300")


def test_checksums_are_read_when_asked_for(run_dir: Path, capsys: Any) -> None:
    newest = run_dir / "checkpoints/step-00000300"
    content = bytearray((newest / "__0_0.distcp").read_bytes())
    content[1_000_000] = 1
    (newest / "__0_0.distcp").write_bytes(bytes(content))
    assert listed(capsys, run_dir)["checkpoints"][2]["status"] == "complete"
    found = listed(capsys, run_dir, "--verify")["checkpoints"]
    assert found[2]["status"] == "damaged" and "checksum" in found[2]["problem"]
    assert [row["step"] for row in found if row["is_next"]] == [200]


def test_weights_alone_are_said_to_be_that_and_never_next(tmp_path: Path, capsys: Any) -> None:
    folder = make_checkpoint(tmp_path, 100, {}, weights_only=True)
    for path in (tmp_path, folder):
        [row] = listed(capsys, path)["checkpoints"]
        assert row["status"] == "weights only" and not row["is_next"]


def test_the_table_fits_a_terminal_and_reads_well(run_dir: Path, capsys: Any) -> None:
    assert main([str(run_dir)]) == 0
    lines = capsys.readouterr().out.splitlines()
    table = lines[:7]
    assert max(map(len, table)) < 80
    assert table[0].split() == ["step", "age", "size", "status", "loss", "rougeLsum"]
    assert " 200  " in table[2] and "2.0 MB  complete     0.250       25.0  best" in table[2]
    assert table[3].endswith("next") and "nan" in table[3]
    assert "incomplete" in table[6] and "moved aside" in table[5]
    assert lines[7].startswith("6.0 MB in all; checked by sizes")
    assert "is damaged: __0_0.distcp" in lines[-1]
    [alone] = listed(capsys, run_dir / "checkpoints/step-00000200")["checkpoints"]
    assert alone["step"] == 200 and not alone["is_best"]


@pytest.mark.parametrize("case", ["missing", "empty", "no argument", "unknown option"])
def test_what_holds_none_is_one_line_of_error(tmp_path: Path, capsys: Any, case: str) -> None:
    argv = {"missing": [str(tmp_path / "nope")], "empty": [str(tmp_path)], "no argument": [],
            "unknown option": [str(tmp_path), "--all"]}[case]  # fmt: skip
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and len(err.splitlines()) == 1


def test_it_needs_no_torch_and_stands_a_closed_pipe(run_dir: Path) -> None:
    program = (
        "import sys\n"
        "from t5_fsdp.checkpoint.__main__ import main\n"
        f"assert main([{str(run_dir)!r}]) == 0\n"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)\n"
    )
    done = run([sys.executable, "-c", program])
    assert done.returncode == 0, done.stderr
    command = (
        f"set -o pipefail; cd {ROOT}; {sys.executable} -m t5_fsdp.checkpoint {run_dir} --json "
        "| (exec 0<&-; sleep 2)"
    )
    piped = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert (piped.returncode, piped.stderr) == (0, "")
