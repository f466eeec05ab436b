"""What stands on the page, and that no text becomes markup."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from t5_fsdp.errors import UserError
from t5_fsdp.report.figures import headline, panels, time_split
from t5_fsdp.report.html import render
from t5_fsdp.report.markup import Markup, escape, json_script, tag
from t5_fsdp.report.runs import read_run, read_runs
from t5_fsdp.report.summaries import browsable
from tests.run_folders import (
    METRICS,
    prediction,
    save_row,
    train_row,
    usual_rows,
    validation_row,
    write_evaluation,
)

NASTY = (
    "</script><img src=x onerror=alert(1)> <!-- ]]> & \" ' \u2028\u2029 \u202eRTL\u202c "
    "\u0645\u0631\u062d\u0628\u0627 \x00\x1b \ud800 \ufffe"
)


class Tags(HTMLParser):
    """Names of the elements, and the text of the page outside scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, name: str, attributes: Any) -> None:
        self.names.append(name)
        self.attributes += [(name, key, value) for key, value in attributes]

    def handle_data(self, data: str) -> None:
        self.text += data


def page_of(*folders: Path) -> str:
    return render(read_runs(folders))


def data_of(page: str) -> Any:
    match = re.search(r'<script type="application/json" id="page-data">(.*?)</script>', page, re.S)
    assert match
    return json.loads(match[1])


def text_of(page: str) -> str:
    return " ".join(html.unescape(re.sub("<[^>]+>", " ", page)).split())


def figures_by_label(folder: Path) -> dict[str, tuple[str, str]]:
    return {f.label: (f.value, f.note) for f in headline(read_run(folder))}


# ---------------------------------------------------------------- escaping


@given(st.text(st.sampled_from(NASTY + "abc\n")))
def test_any_text_is_only_text(text: str) -> None:
    made = Tags(tag("p", text, title=text) + json_script("data", {text: [text]}))
    assert made.names == ["p", "script"]
    (script,) = re.findall(r">(\{.*\})<", json_script("data", {text: text}), re.S)
    assert json.loads(script) == {text: text}
    assert not set(script) & set("<>&\u2028\u2029")


def test_markup_stays_and_text_does_not() -> None:
    assert tag("b", Markup("<i>x</i>"), "<i>", None) == "<b><i>x</i>&lt;i&gt;</b>"
    assert escape("\x00\ud800\tx") == "\ufffd\ufffd\tx"


def test_nasty_texts_everywhere_make_no_element(make_run) -> None:
    plain = [make_run("plain"), make_run("second")]
    names = {*Tags(page_of(*plain)).names, *Tags(page_of(plain[0])).names}
    rows = [train_row(10), validation_row(10)]
    folders = [make_run(f"<img src=x>&{n}", rows, NASTY, **{"model.name": NASTY}) for n in "ab"]
    for folder in folders:
        write_evaluation(
            folder,
            "<b>validation",
            10,
            [prediction(0, id=NASTY, document=NASTY, reference=NASTY, prediction=NASTY)],
            hints=[NASTY],
            lead_baseline={},
        )
        audit = {"splits": {NASTY: {"dropped": {NASTY: 1}, "source_tokens": {}}}}
        more = {"notes": [NASTY], "warnings": [NASTY], "duplicates_across": {NASTY: 1}}
        (folder / "data_audit.json").write_text(json.dumps(audit | more))
        (folder / "environment.json").write_text(json.dumps({NASTY: NASTY, "device": [NASTY]}))
    for chosen in (folders, folders[:1]):
        page = page_of(*chosen)
        made = Tags(page)
        assert set(made.names) <= names
        assert not [a for a in made.attributes if a[1].startswith("on")]
        rows = [row for e in data_of(page)["evaluations"] for row in e["rows"]]
        assert [NASTY, NASTY, [NASTY], NASTY] in [row[:4] for row in rows]


# ---------------------------------------------------------------- one file, nothing from outside


def test_the_page_loads_nothing(make_run) -> None:
    made = Tags(page_of(make_run()))
    assert not {"link", "img", "iframe", "object", "embed", "base", "form"} & set(made.names)
    references = [v for _, key, v in made.attributes if key in ("src", "href", "xlink:href")]
    assert references and all(value and value.startswith("#") for value in references)


def test_the_policy_allows_just_the_pages_own_script_and_style(make_run) -> None:
    page = page_of(make_run())
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    for kind, text in (
        ("script-src", re.findall(r"<script>(.*?)</script>", page, re.S)[0]),
        ("style-src", re.findall(r"<style>(.*?)</style>", page, re.S)[0]),
    ):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind} 'sha256-{digest}'" in html.unescape(policy)
    assert "default-src 'none'" in html.unescape(policy)
    assert " style=" not in page  # which the policy would block


# ---------------------------------------------------------------- figures and curves


def test_the_figures_are_those_of_the_rows(make_run) -> None:
    found = figures_by_label(make_run())
    assert found["State"][0] == "finished"
    assert found["Steps"] == ("500", "epoch 1 of 3")
    assert found["Best validation ROUGE-Lsum"] == ("41.0", "step 500, 32 examples")
    assert found["Test ROUGE-Lsum"] == ("33.0", "95 % interval 31.0 to 35.0, lead baseline 20.0")
    assert found["Validation loss"] == ("2.000", "step 500, the lowest")
    assert found["Tokens a second"] == ("2,000", "mean, all devices; 0.5 s a step")
    # 50 rows of 10 steps of 0.5 s, 5 validations of 20 s, 5 checkpoints of 2 s.
    assert found["Time"][0] == "6 min 0 s"
    assert found["Cost of validation"] == ("28 %", "5 validations, 1 min 40 s")
    assert found["Peak memory"] == ("30.00 GiB", "allocated, of the largest rank")
    assert found["MFU"][0].startswith("42.")


def test_the_mean_speed_weighs_time_not_rows(make_run) -> None:
    rows = [train_row(10), train_row(20, tokens_per_second=20_000.0, step_seconds=0.05)]
    assert figures_by_label(make_run(rows=rows))["Tokens a second"][0] == "3,636"  # 20,000 in 5.5 s


def test_time_is_split_by_phase_where_it_is_measured(make_run) -> None:
    found = {share.label: share.seconds for share in time_split(read_run(make_run()))}
    assert found == pytest.approx(
        {
            "Waiting for data": 5.0, "Forward": 70.0, "Backward": 125.0, "Communication": 25.0,
            "Optimizer": 15.0, "Other parts of steps": 10.0, "Validation": 100.0,
            "Waiting for checkpoints": 10.0,
        }
    )  # fmt: skip
    plain = [
        {name: value for name, value in train_row(10).items() if not name.startswith(p)}
        for p in [("data_", "forward_", "backward_", "communication_", "optimizer_")]
    ]
    found = {s.label: s.seconds for s in time_split(read_run(make_run("plain", plain)))}
    assert found == {"Training steps": 5.0}


@pytest.mark.parametrize("state", ["failed", "preempted", "running"])
def test_a_run_without_anything_has_a_page(make_run, state: str) -> None:
    folder = make_run(rows=[], state=state, evaluated=False)
    for name in ("config.yaml", "data_audit.json", "environment.json", "metrics.jsonl"):
        (folder / name).unlink()
    page = page_of(folder)
    assert re.findall(r'<section id="(\w+)"', page) == ["figures"]
    assert f"State {state}" in text_of(page)
    assert f'class="value state-{state}"' in page
    assert "<figure" not in page


def test_panels_without_data_are_left_out(make_run) -> None:
    rows = [train_row(10, mfu=None, slowest_rank_ratio=None, loss_scale=None, skipped_steps=0)]
    titles = [panel.title for panel in panels([read_run(make_run(rows=rows))])]
    assert titles == [
        "Loss", "Learning rate", "Gradient norm", "Throughput", "Throughput", "Time of a step",
        "Padding", "Memory",
    ]  # fmt: skip
    rows = [train_row(10, skipped_steps=2, allocator_retries=1, loss_scale=1024.0)]
    titles = [panel.title for panel in panels([read_run(make_run("b", rows))])]
    assert {"Skipped steps", "Allocator retries", "Loss scale", "MFU"} <= set(titles)


def test_one_process_has_no_slowest_rank(make_run) -> None:
    alone, many = make_run("alone"), make_run("many")
    (alone / "environment.json").write_text(json.dumps({"world_size": 1}))
    by_title = {panel.title: panel for panel in panels(read_runs([alone, many]))}
    assert [line.name for line in by_title["Slowest rank"].series] == ["many"]
    assert "Slowest rank" not in [panel.title for panel in panels([read_run(alone)])]


def test_the_validation_loss_names_the_lowest_where_it_is_another(make_run) -> None:
    rows = [validation_row(100, loss=1.5), validation_row(200, loss=2.0)]
    found = figures_by_label(make_run(rows=rows))["Validation loss"]
    assert found == ("2.000", "step 200; lowest 1.500 at step 100")


def test_the_audits_lead_baseline_stands_beside_scores_of_as_many_examples(make_run) -> None:
    folder = make_run()
    audited = {"examples": 40, **dict.fromkeys(METRICS, 0.25)}
    (folder / "data_audit.json").write_text(json.dumps({"lead_baseline": {"validation": audited}}))
    assert "validation, lead baseline 40 25.0" in text_of(page_of(folder))
    for step, number, is_shown in ((400, 32, False), (500, 40, True)):
        write_evaluation(folder, "validation", step, map(prediction, range(number)))
        assert ("validation, lead baseline 40 25.0" in text_of(page_of(folder))) == is_shown


def test_a_hundred_thousand_rows_stay_small(make_run) -> None:
    keys = ("kind", "step", "loss", "grad_norm")
    rows = [
        {key: value for key, value in train_row(step, 1).items() if key in keys}
        for step in range(1, 100_001)
    ]
    page = page_of(make_run(rows=rows, evaluated=False))
    assert len(page) < 400_000
    assert "Curves of many points" in page


def test_checkpoints_are_kept_or_pruned(make_run) -> None:
    folder = make_run(rows=[save_row(100), validation_row(100), save_row(200)])
    assert "100 not in this folder, best validation 34.0 GB 30 s 2 s 21.0" in text_of(
        page_of(folder)
    )
    (folder / "checkpoints" / "step-00000200").mkdir(parents=True)
    text = text_of(page_of(folder))
    assert "100 pruned, best validation" in text and "200 incomplete 34.0 GB" in text


def test_what_is_wrong_with_a_checkpoint_is_said(make_run) -> None:
    folder = make_run(rows=[save_row(200)])
    checkpoint = folder / "checkpoints" / "step-00000200"
    checkpoint.mkdir(parents=True)
    (checkpoint / "COMPLETE").write_text('{"format_version": 99}')
    text = text_of(page_of(folder))
    assert "200 not readable" in text and "is a checkpoint of format 99" in text
    assert "damaged" not in text
    (checkpoint / "COMPLETE").write_text("{}")
    text = text_of(page_of(folder))
    assert "200 damaged" in text and "does not have the content" in text


def test_warnings_of_the_audit_come_first(make_run) -> None:
    text = text_of(page_of(make_run()))
    assert text.index("30 % of the sources are cut") < text.index("train 1,010 1,000 10 2")
    assert "train: 10 rows left out, empty summary" in text
    assert "documents of test in train: 3" in text
    assert "train, source 100.5 90 180 1,127 30.0 % 0.10 %" in text


def test_options_unlike_the_defaults_are_listed(make_run) -> None:
    folder = make_run(
        **{"optimizer.lr": 3e-3, "train.epochs": 3, "data.train_files": ["a b.jsonl"]}
    )
    page = page_of(folder)
    changed = text_of(page[page.index('id="configuration"') : page.index("All 1")])
    assert "optimizer.lr 0.003 0.0001" in changed
    assert 'data.train_files ["a b.jsonl"] []' in changed
    assert "train.epochs" not in changed and "run_dir" not in changed


def test_a_comparison_with_a_baseline_is_shown(make_run) -> None:
    folder = make_run()
    values = {"difference": 0.123, "difference_low": 0.1, "difference_high": 0.15, "wins": 30,
              "ties": 5, "losses": 10}  # fmt: skip
    comparison = {"baseline": "oracle", "metrics": dict.fromkeys(
        ("rouge1", "rouge2", "rougeL", "rougeLsum"), values)}  # fmt: skip
    path = folder / "evaluation/step-00000500/test/comparison.json"
    path.write_text(json.dumps(comparison))
    text = text_of(page_of(folder))
    assert "test, step 500: difference to oracle" in text
    assert "ROUGE-2 +12.3 +10.0 to +15.0 30 5 10" in text


# ---------------------------------------------------------------- several runs


def test_several_runs_are_drawn_over_each_other(make_run) -> None:
    first, second = make_run("a"), make_run("b", [train_row(10), validation_row(20)])
    drawn = {panel.title: panel for panel in panels(read_runs([first, second]))}
    assert [line.name for line in drawn["Training loss"].series] == ["a", "b"]
    assert [line.color for line in drawn["Validation ROUGE-2"].series] == [0, 1]
    page = page_of(first, second)
    assert "2 runs compared" in text_of(page)
    assert [e["label"] for e in data_of(page)["evaluations"]] == [
        "a: test, step 500", "b: test, step 500",
    ]  # fmt: skip


def test_of_several_runs_the_options_that_differ_come_first(make_run) -> None:
    folders = [make_run(name, **{"optimizer.lr": lr}) for name, lr in (("a", 1e-3), ("b", 2e-3))]
    page = page_of(*folders)
    table = page[page.index('id="configuration"') :]
    assert text_of(table[: table.index("<details>")]).endswith(
        "Options in which the runs differ option a b optimizer.lr 0.001 0.002"
    )
    same = page_of(make_run("c"), make_run("d"))
    assert "The runs have the same configuration." in same


# ---------------------------------------------------------------- summaries


def test_documents_are_cut_until_the_page_is_small(make_run) -> None:
    folder = make_run(evaluated=False)
    rows = [prediction(n, document="x" * 5000, prediction="y" * 3000) for n in range(50)]
    write_evaluation(folder, "test", 500, rows)
    (made,) = browsable(read_runs([folder]), most_bytes=10**9)
    assert made["rows"][0][1] == "x" * 5000 and made["cut"] == ""
    (made,) = browsable(read_runs([folder]), most_bytes=220_000)
    assert made["rows"][0][1] == ["x" * 2000, 3000]
    assert made["rows"][0][3] == ["y" * 2000, 1000]
    assert "up to 2,000 characters" in made["cut"] and "50 examples are cut" in made["cut"]


def test_when_all_is_cut_the_worst_and_best_stay(make_run) -> None:
    folder = make_run(evaluated=False)
    write_evaluation(folder, "test", 500, map(prediction, range(101)))
    (made,) = browsable(read_runs([folder]), most_bytes=3000)
    scores = [row[4 + made["fields"].index("rougeLsum")] for row in made["rows"]]
    assert 4 <= len(scores) < 40
    assert min(scores) == 0.0 and max(scores) == 1.0
    num_worst = sum(score < 0.5 for score in scores)
    assert 0 <= num_worst - (len(scores) - num_worst) <= 1
    assert not [score for score in scores if 0.3 < score < 0.7]
    assert "of 101 examples: the worst and the best by ROUGE-Lsum" in made["cut"]


@pytest.mark.parametrize("text", ["<", "\u4e2d", "\x00", "\ud800", '"'])
def test_the_page_is_small_in_bytes_whatever_is_written(make_run, text: str) -> None:
    folder = make_run(rows=[], evaluated=False)
    rows = [
        prediction(n, id=f"{n}{text * 9000}", document=text * 9000, reference=text * 9000)
        for n in range(30)
    ]
    write_evaluation(folder, "test", 500, rows)
    page = render(read_runs([folder]), most_bytes=150_000)
    assert len(page.encode(errors="backslashreplace")) < 250_000
    assert 2 <= len(data_of(page)["evaluations"][0]["rows"]) <= 30


def test_many_numbers_and_references_are_left_out(make_run) -> None:
    folder = make_run(evaluated=False)
    row = prediction(0, **{f"figure_{n}": n for n in range(1000)}, **{"long" * 99: 1})
    del row["reference"]
    write_evaluation(folder, "test", 500, [row | {"references": ["a"] * 999}])
    (made,) = browsable(read_runs([folder]))
    assert made["fields"][:5] == ["rouge1", "rouge2", "rougeL", "rougeLsum", "summary_words"]
    assert len(made["fields"]) == 30 and len(made["rows"][0][2]) == 20
    assert "30 of the 1,007 columns" in made["cut"]
    assert "up to 999 references it has 20" in made["cut"]


def test_bytes_that_are_no_utf8_are_said_once(make_run) -> None:
    folder = make_run()
    predictions = folder / "evaluation/step-00000500/test/predictions.jsonl"
    predictions.write_bytes(predictions.read_bytes().replace(b"Rinse rice", b"Rinse \xff rice"))
    environment = folder / "environment.json"
    environment.write_bytes(b'\xef\xbb\xbf{"device": "A\xff\xfe", "host": "\xff"}')
    page = page_of(folder)
    assert text_of(page).count("environment.json has bytes that are no UTF-8") == 1
    (made,) = data_of(page)["evaluations"]
    assert made["rows"][3][2] == ["Rinse \ufffd rice 3."]
    assert made["cut"].endswith("Bytes that are no UTF-8 are shown as \ufffd in 45 lines.")


def test_any_value_anywhere_makes_a_page(make_run) -> None:
    folder, other = make_run(rows=usual_rows(100)), make_run("other")
    evaluation = folder / "evaluation/step-00000500/test"
    names = ["config.yaml", "status.json", "environment.json", "data_audit.json", "metrics.jsonl"]
    files = [*(folder / name for name in names), evaluation / "rouge.json"]
    texts = {file: file.read_text() for file in files}
    for value in (None, True, -1, 0.5, float("nan"), 10**400, "text", "", [], [[]], {"a": {}}):
        for file, text in texts.items():
            lines = text.splitlines() if file.suffix == ".jsonl" else None
            found = [json.loads(line) for line in lines] if lines else yaml.safe_load(text)
            spoilt = _with_every_leaf(found, value)
            file.write_text("\n".join(map(json.dumps, spoilt)) if lines else json.dumps(spoilt))
        page_of(folder)
        assert "nan" not in re.findall(r"<main>.*</main>", page_of(folder, other), re.S)[0]


def _with_every_leaf(found: Any, value: Any) -> Any:
    if isinstance(found, dict):
        return {
            key: inner if key in ("kind", "step") else _with_every_leaf(inner, value)
            for key, inner in found.items()
        }
    return [_with_every_leaf(inner, value) for inner in found] if isinstance(found, list) else value


def test_of_the_validations_the_best_is_shown(make_run) -> None:
    folder = make_run(rows=[validation_row(100), validation_row(200, rougeLsum=0.0)])
    for step in (100, 200):
        write_evaluation(folder, "validation", step, [prediction(step)])
    page = page_of(folder)
    labels = [made["label"] for made in data_of(page)["evaluations"]]
    assert labels == ["test, step 500", "validation, step 100"]


def test_predictions_without_ids_and_documents_are_numbered(make_run) -> None:
    folder = make_run(evaluated=False)
    rows = [{"references": ["a", "b"], "prediction": "c", "rouge1": 0.5}, {"reference": "d",
             "prediction": ""}]  # fmt: skip
    write_evaluation(folder, "test", 1, rows)
    (made,) = browsable(read_runs([folder]))
    assert made["rows"] == [["1", None, ["a", "b"], "c", 0.5], ["2", None, ["d"], "", None]]
    assert made["metric"] == ""


def test_spoilt_predictions_are_named(make_run) -> None:
    folder = make_run()
    with (folder / "evaluation/step-00000500/test/predictions.jsonl").open("a") as file:
        file.write('{"reference": "a"')
    with pytest.raises(UserError, match=r"predictions\.jsonl, line 46 is not JSON"):
        page_of(folder)
