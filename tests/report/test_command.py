"""scripts/report.py: where the page goes, and what is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from t5_fsdp.cli.report import main, refresh_report
from t5_fsdp.console import Console
from tests.conftest import ROOT


def refusal(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    """The one line of a command line that is refused."""
    assert main([str(word) for word in argv]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("error: ")
    return err


def test_the_script_writes_into_the_runs_folder(make_run, tmp_path: Path) -> None:
    folder = make_run()
    command = [sys.executable, ROOT / "scripts" / "report.py", "--run", folder]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"report: {folder / 'report.html'}\n"
    assert (folder / "report.html").read_text().startswith("<!doctype html>")


def test_several_runs_have_a_page_of_their_own(make_run) -> None:
    first, second = make_run("a"), make_run("b")
    assert main(["--run", str(first), "--run", str(second)]) == 0
    assert main(["--run", str(first), str(second)]) == 0
    assert (first / "comparison.html").exists() and not (first / "report.html").exists()


def test_an_older_report_is_replaced_and_another_file_is_not(make_run, tmp_path, capsys) -> None:
    folder, output = make_run(), tmp_path / "new" / "page.html"
    for _ in range(2):
        assert main(["--run", str(folder), "--output", str(output)]) == 0
    capsys.readouterr()
    output.write_text("<p>mine</p>")
    assert "is no report" in refusal(capsys, "--run", folder, "--output", output)
    assert output.read_text() == "<p>mine</p>"
    (folder / "report.html").write_text("notes")
    assert "is no report" in refusal(capsys, "--run", folder)


def test_a_link_is_written_through(make_run, tmp_path: Path) -> None:
    target, link = tmp_path / "target.html", tmp_path / "link.html"
    link.symlink_to(target)
    assert main(["--run", str(make_run()), "--output", str(link)]) == 0
    assert link.is_symlink() and target.is_file()


def test_outputs_that_can_not_be_are_refused(make_run, tmp_path: Path, capsys) -> None:
    folder = make_run()
    assert "is a folder" in refusal(capsys, "--run", folder, "--output", tmp_path)
    assert "no regular file" in refusal(capsys, "--run", folder, "--output", "/dev/null")
    (tmp_path / "file").touch()
    below = tmp_path / "file" / "page.html"
    assert "can't be written" in refusal(capsys, "--run", folder, "--output", below)


def test_bad_runs_are_refused(make_run, tmp_path: Path, capsys) -> None:
    folder = make_run()
    assert "does not exist" in refusal(capsys, "--run", folder, tmp_path / "nope")
    assert "holds no run" in refusal(capsys, "--run", tmp_path)
    assert "--run" in refusal(capsys)
    assert "--ru" in refusal(capsys, "--ru", folder)
    (folder / "metrics.jsonl").write_text('{"kind": "train"\n{}\n')
    assert "line 1 is no row" in refusal(capsys, "--run", folder)


def test_paths_that_can_not_be_are_a_line(make_run, tmp_path: Path, capsys) -> None:
    folder, loop, long = make_run(), tmp_path / "loop", "x" * 300
    loop.symlink_to("loop")
    assert "does not exist" in refusal(capsys, "--run", loop)
    assert "File name too long" in refusal(capsys, "--run", long)
    assert "does not exist" in refusal(capsys, "--run", folder, loop)
    assert "File name too long" in refusal(capsys, "--run", folder, "--output", long)
    assert "--output" in refusal(capsys, "--run", folder, "--output", loop)
    assert "is empty" in refusal(capsys, "--run", "")
    assert main(["--run", str(folder), "--output", str(tmp_path / ("y" * 250))]) == 2


def test_a_folder_that_may_not_be_searched_is_a_line(make_run, capsys, monkeypatch) -> None:
    def refuse(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    folder = make_run()
    monkeypatch.setattr(Path, "is_dir", refuse)  # root may search anything
    assert "can't be read or written (Permission denied)" in refusal(capsys, "--run", folder)


def test_help_needs_no_torch() -> None:
    program = (
        "import sys\nfrom t5_fsdp.cli.report import main\n"
        "try:\n    main(['--help'])\n"
        "finally:\n    assert not {'torch', 'transformers', 'datasets'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "--run DIR [DIR ...]" in done.stdout and "--output FILE" in done.stdout


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_file_that_may_not_be_read_is_named(make_run, capsys) -> None:
    folder = make_run()
    (folder / "metrics.jsonl").chmod(0)
    assert "metrics.jsonl can't be read" in refusal(capsys, "--run", folder)


def test_a_report_that_fails_is_only_warned_of(make_run, capsys, monkeypatch) -> None:
    console = Console()
    folder = make_run()
    (folder / "metrics.jsonl").write_text("x\ny\n")
    refresh_report(folder, console)
    assert "warning: no report.html is written: " in capsys.readouterr().out
    monkeypatch.setattr("t5_fsdp.cli.report.render", lambda runs: 1 / 0)
    refresh_report(make_run("other"), console)
    assert "(ZeroDivisionError: division by zero)" in capsys.readouterr().out
    refresh_report(folder / "nothing", console)
    assert capsys.readouterr().out == ""
