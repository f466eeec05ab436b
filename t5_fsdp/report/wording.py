"""Numbers as people read them."""

from __future__ import annotations

from datetime import datetime

MISSING = "\u2013"  # stands in a cell that has no value


def format_value(value: float) -> str:
    """A number as people read it: about four digits."""
    size = abs(value)
    if 1000 <= size < 1e15:
        return f"{value:,.0f}"
    return f"{value:.4g}" if value == 0 or 1e-3 <= size < 1000 else f"{value:.3g}"


def points(value: float | None) -> str:
    """A ROUGE score from 0 to 1 as printed, from 0 to 100."""
    return "" if value is None else f"{100 * value:.1f}"


def duration(seconds: float) -> str:
    """Seconds in the units that people use."""
    if seconds < 100:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    whole = round(seconds)
    if whole < 6000:
        return f"{whole // 60} min {whole % 60} s"
    minutes = round(seconds / 60)
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60} min"
    hours = round(seconds / 3600)
    return f"{hours // 24} d {hours % 24} h"


def percent(part: float, digits: int = 0) -> str:
    """A part of 1 as a percentage."""
    return f"{100 * part:.{digits}f} %"


def moment(text: str) -> str:
    """A time as `%Y-%m-%dT%H:%M:%S%z` to the minute, with its zone; any other text as it is."""
    try:
        return f"{datetime.strptime(text, '%Y-%m-%dT%H:%M:%S%z'):%Y-%m-%d %H:%M %Z}"
    except ValueError:
        return text
