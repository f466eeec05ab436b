"""What the terminal can't show ends nothing."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from t5_fsdp.console import Console


@pytest.mark.parametrize(
    ("encoding", "shown"), [("utf-8", "caf\u00e9 \\ud83d\n"), ("ascii", "caf\\xe9 \\ud83d\n")]
)
def test_other_characters_are_written_as_escapes(tmp_path: Path, encoding: str, shown: str) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(stream=stream)
    console.open_log(tmp_path / "log.txt")
    console.say("caf\u00e9 \ud83d")
    console.close()
    assert stream.buffer.getvalue().decode(encoding) == shown  # type: ignore[attr-defined]
    log = (tmp_path / "log.txt").read_text(encoding="utf-8")
    assert log.endswith("caf\u00e9 \\ud83d\n")
