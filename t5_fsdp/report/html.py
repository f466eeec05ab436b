"""The page: one HTML file that needs nothing else, neither network nor other files."""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from t5_fsdp.report.charts import curves_of, legend, time_of
from t5_fsdp.report.markup import Markup, each, join, json_script, tag
from t5_fsdp.report.overview import figures_of, scores_of
from t5_fsdp.report.runs import METRICS, Run, as_mapping
from t5_fsdp.report.settings import configuration_of
from t5_fsdp.report.summaries import MOST_BYTES, browsable
from t5_fsdp.report.tables import audit_of, checkpoints_of, environment_of
from t5_fsdp.report.wording import moment

GENERATOR = "t5_fsdp report"


def render(runs: Sequence[Run], most_bytes: int = MOST_BYTES) -> str:
    """The page about one run, or about several beside each other.

    Args:
        most_bytes: of the summaries that the page holds, about; see `summaries.browsable`.

    Raises:
        UserError: a predictions file can't be read.
    """
    evaluations = browsable(runs, most_bytes)
    curves, chart_data = curves_of(runs)
    sections = [
        ("figures", "Figures", figures_of(runs)),
        ("scores", "ROUGE", scores_of(runs)),
        ("curves", "Curves", curves),
        ("time", "Time", time_of(runs)),
        ("summaries", "Summaries", _summaries(evaluations)),
        ("configuration", "Configuration", configuration_of(runs)),
        ("data", "Data", each(runs, audit_of)),
        ("checkpoints", "Checkpoints", each(runs, checkpoints_of)),
        ("environment", "Environment", each(runs, environment_of)),
    ]
    present = [(name, title, body) for name, title, body in sections if body]
    data = {
        "runs": len(runs),
        "charts": chart_data,
        "evaluations": evaluations,
        "titles": METRICS,
    }
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs compared"
    body = join(
        [
            _header(runs, title, [(name, heading) for name, heading, _ in present]),
            tag("main", *(_section(*section) for section in present)),
            tag("footer", f"Written {_now()} by t5_fsdp. This file is complete: it loads nothing."),
            json_script("page-data", data),
        ]
    )
    return _document(title, body)


def _document(title: str, body: Markup) -> str:
    style, script = _asset("page.css"), _asset("page.js")
    policy = (
        f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    head = join(
        [
            tag("meta", charset="utf-8"),
            tag("meta", name="generator", content=GENERATOR),
            tag("meta", http_equiv="Content-Security-Policy", content=policy),
            tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
            tag("meta", name="color-scheme", content="light dark"),
            tag("title", f"{title} · t5_fsdp"),
            tag("style", Markup(style)),
        ],
        "\n",
    )
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n{head}\n</head>\n<body>\n{body}\n'
        f"<script>{script}</script>\n</body>\n</html>\n"
    )


def _asset(name: str) -> str:
    return resources.files("t5_fsdp.report").joinpath(name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    """How a Content-Security-Policy names the one style or script that it allows."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _now() -> str:
    return moment(time.strftime("%Y-%m-%dT%H:%M:%S%z"))


def _header(runs: Sequence[Run], title: str, places: Sequence[tuple[str, str]]) -> Markup:
    lines = [_model_line(runs[0])] if len(runs) == 1 else []
    links = (tag("a", heading, href=f"#{name}") for name, heading in places)
    return tag(
        "header",
        tag("h1", title),
        *(tag("p", line, class_="lead") for line in lines),
        legend(runs) if len(runs) > 1 else None,
        _notices(runs),
        tag("nav", *links, aria_label="Sections"),
    )


def _model_line(run: Run) -> str:
    """What was trained on what, in a line."""
    environment, device = run.environment, run.environment.get("device")
    model = run.option("model.name")
    if model is None and run.config:
        shape = as_mapping(run.option("model.config"))
        dimension = f", d_model {shape['d_model']}" if "d_model" in shape else ""
        model = f"T5 from random weights{dimension}"
    data = run.option("data.dataset") or run.option("data.source")
    parts = [
        model,
        f"data: {data}" if data else None,
        f"{environment.get('world_size')} x {device}" if device else None,
        " ".join(
            str(run.option(f"parallel.{name}"))
            for name in ("engine", "sharding", "param_dtype")
            if run.option(f"parallel.{name}")
        ),
        moment(str(environment.get("time", ""))),
    ]
    return " · ".join(str(part) for part in parts if part)


def _notices(runs: Sequence[Run]) -> Markup | None:
    lines = [
        f"{run.name}: {notice}" if len(runs) > 1 else notice
        for run in runs
        for notice in run.notices
    ]
    return tag("ul", *(tag("li", line) for line in lines), class_="warnings") if lines else None


def _section(name: str, title: str, body: Markup) -> Markup:
    heading = tag("h2", title, id=f"{name}-title")
    return tag("section", heading, body, id=name, aria_labelledby=f"{name}-title")


# ---------------------------------------------------------------- summaries


def _summaries(evaluations: Sequence[Mapping[str, Any]]) -> Markup:
    """The controls; the page's script fills in the examples."""
    if not evaluations:
        return Markup()
    choices = (tag("option", e["label"], value=n) for n, e in enumerate(evaluations))
    controls = [
        _labelled("Evaluation", tag("select", *choices, id="evaluation")),
        _labelled("Sort by", tag("select", id="sort")),
        _labelled("Order", tag("select", id="order")),
        _labelled("Search", tag("input", id="query", type="search", autocomplete="off",
                                spellcheck="false", placeholder="words of any text, or an id")),
    ]  # fmt: skip
    pager = [
        tag("button", "Previous", type="button", id="previous"),
        tag("output", id="position", aria_live="polite"),
        tag("button", "Next", type="button", id="next"),
    ]
    return join(
        [
            tag("noscript", tag("p", "The summaries need JavaScript, which is off here.")),
            tag("div", *controls, class_="controls needs-script"),
            tag("p", id="cut", class_="note"),
            tag("p", id="paper", class_="note"),
            tag("div", id="examples"),
            tag("div", *pager, class_="pager needs-script"),
        ]
    )


def _labelled(label: str, control: Markup) -> Markup:
    return tag("label", tag("span", label), control)
