"""The report that a run and its evaluation leave behind."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

from tests.conftest import tiny_options


def test_a_run_and_its_evaluation_write_the_report(
    pools: Any, corpus: Path, trained: Path, tmp_path: Path
) -> None:
    page = (trained / "report.html").read_text(encoding="utf-8")
    assert "State</dt><dd" in page and "test, step 10" not in page
    run_dir = tmp_path / "run"
    shutil.copytree(trained, run_dir)
    argv = [*tiny_options(corpus, run_dir), "--checkpoint", str(run_dir)]
    code, out, err = pools(2).command("eval_rouge", argv)
    assert code == 0, err
    assert f"report: {run_dir}/report.html" in out
    rouge = json.loads((run_dir / "evaluation/step-00000010/test/rouge.json").read_text())
    lead = rouge["lead_baseline"]["rouge1"]["fmeasure"]
    page = (run_dir / "report.html").read_text(encoding="utf-8")
    assert re.search(r"test, step 10</th>", page)
    assert f"lead baseline {100 * rouge['lead_baseline']['rougeLsum']['fmeasure']:.1f}" in page
    assert 0 < lead <= 1


def test_a_failed_run_has_a_report_and_what_is_in_its_way_is_a_warning(
    pools: Any, corpus: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    options = {"optimizer.lr": "1e38", "train.skip_nonfinite_steps": 0}
    argv = tiny_options(corpus, run_dir, **options)
    code, _, err = pools(1).command("train", argv)
    assert code == 2 and err.count("error:") == 1
    assert "state-failed" in (run_dir / "report.html").read_text(encoding="utf-8")

    (run_dir / "report.html").write_text("mine")
    code, out, err = pools(1).command("train", tiny_options(corpus, run_dir))
    assert code == 0, err
    assert "warning: no report.html is written: " in out
    assert (run_dir / "report.html").read_text() == "mine"
