"""Counts, sizes and times as a sentence has them: one row, two rows; MiB where GiB would be 0."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """E.g. "1 row", "5,000 rows", "2 summaries"; of several words the last one is the noun."""
    return f"{number:,} {noun if number == 1 else plural(noun)}"


def plural(noun: str) -> str:
    """Of a regular noun."""
    if noun.endswith("y") and noun[-2:-1] not in "aeiou":
        return f"{noun[:-1]}ies"
    return noun + ("es" if noun.endswith(("s", "x", "ch", "sh")) else "s")


def memory_size(num_bytes: float) -> str:
    """In GiB, or MiB where that would be a fraction."""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"


def traffic_size(num_bytes: float) -> str:
    """Of what goes over a link, in decimal units, as bandwidths are given."""
    for unit, length in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= length:
            return f"{num_bytes / length:.2f} {unit}"
    return f"{num_bytes:.0f} B"


def duration(seconds: float) -> str:
    """Hours, minutes, seconds or milliseconds, whichever the number is largest above 1 in."""
    if seconds >= 3600:
        return f"{seconds / 3600:,.2f} h"
    for unit, length in (("min", 60.0), ("s", 1.0)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds * 1000:.3g} ms"
