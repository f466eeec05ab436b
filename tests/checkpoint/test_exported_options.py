"""The options that an exported folder says it was trained with."""

from __future__ import annotations

import json
from pathlib import Path

from t5_fsdp.checkpoint.exported_options import exported_options

DATA = {"prefix": "x: ", "keep_newlines": True, "max_source_tokens": 99}
FIRST = {"num_beams": 3, "max_new_tokens": 7, "length_penalty": 0.5}


def written(folder: Path, generation: dict[str, object], data: dict[str, object] = DATA) -> Path:
    config = {"task_specific_params": {"summarization": data}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def test_folders_of_before_there_were_more_options_are_known(tmp_path: Path) -> None:
    assert exported_options(written(tmp_path, FIRST)) == {"data": DATA, "evaluation": FIRST}
    later = {**FIRST, "min_new_tokens": 2, "no_repeat_ngram_size": 3, "do_sample": False}
    found = exported_options(written(tmp_path, {**later, "top_k": 50}))
    assert found == {"data": DATA, "evaluation": later}
    later |= {"do_sample": True, "temperature": 0.7, "top_k": 5, "top_p": 0.9}
    assert exported_options(written(tmp_path, later))["evaluation"] == later


def test_other_folders_have_none(tmp_path: Path) -> None:
    assert exported_options(tmp_path) == {}
    assert exported_options(written(tmp_path, {"num_beams": 3, "max_new_tokens": 7})) == {}
    assert exported_options(written(tmp_path, FIRST, {"prefix": "summarize: "})) == {}
