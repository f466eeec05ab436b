"""HTML and SVG in which every text is escaped unless it was made here."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from t5_fsdp.report.runs import Run

# Controls but tab and newline, halves of surrogate pairs, and what is no character: HTML has none.
_NO_TEXT = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
_VOID = frozenset({"br", "meta", "input", "hr"})
# Inside a script element `<` could end it; U+2028 and U+2029 end lines in older JavaScript.
_IN_SCRIPT = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}


class Markup(str):
    """Text that is HTML already."""


def escape(value: Any) -> Markup:
    """A value as text of an element or attribute; markup stays what it is."""
    if isinstance(value, Markup):
        return value
    return Markup(html.escape(_NO_TEXT.sub("\ufffd", str(value))))


def join(parts: Any, separator: str = "") -> Markup:
    """Several pieces in a row; None is left out."""
    return Markup(separator.join(escape(part) for part in parts if part is not None))


def tag(name: str, /, *children: Any, **attributes: Any) -> Markup:
    """An element.

    Args:
        children: texts, which are escaped, and markup; None is left out.
        attributes: None or False: left out; True: without value. `_` at the end of a name goes and
            `_` in it becomes `-`.
    """
    written = []
    for key, value in attributes.items():
        key = key.rstrip("_").replace("_", "-")
        if value is True:
            written.append(f" {key}")
        elif value is not None and value is not False:
            written.append(f' {key}="{escape(value)}"')
    start = f"<{name}{''.join(written)}>"
    return Markup(start if name in _VOID else f"{start}{join(children)}</{name}>")


def json_script(identity: str, value: Any) -> Markup:
    """A script element that holds data, in which no text can end it.

    Raises:
        ValueError: a number is NaN or infinite.
    """
    return Markup(f'<script type="application/json" id="{identity}">{script_text(value)}</script>')


def script_text(value: Any) -> str:
    """A value as JSON that can stand in a script element; raises as `json_script`."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.translate(_IN_SCRIPT)


def table(
    head: Sequence[Any], rows: Iterable[Sequence[Any]], caption: str, *, texts: int = 1
) -> Markup:
    """A table that scrolls by itself where it is too wide; its first column are headings.

    Args:
        texts: so many columns on the left are text; the others are numbers, set to the right.
    """

    def side(column: int) -> str | None:
        return None if column < texts else "number"

    header = tag(
        "tr", *(tag("th", cell, scope="col", class_=side(n)) for n, cell in enumerate(head))
    )
    body = [
        tag(
            "tr",
            tag("th", row[0], scope="row"),
            *(tag("td", cell, class_=side(n)) for n, cell in enumerate(row[1:], start=1)),
        )
        for row in rows
    ]
    made = tag(
        "table",
        tag("caption", caption, class_="unseen"),
        tag("thead", header),
        tag("tbody", *body),
    )
    return tag("div", made, class_="scroll", tabindex=0, role="region", aria_label=caption)


def each(runs: Sequence[Run], part: Callable[[Run], Markup]) -> Markup:
    """A part of each run, folded under its name if there are several."""
    bodies = [(run, part(run)) for run in runs]
    if len(runs) == 1:
        return bodies[0][1]
    return join(
        tag("details", tag("summary", tag("bdi", run.name)), body) for run, body in bodies if body
    )
