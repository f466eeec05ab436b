"""The options that an exported folder carries along, so that it is evaluated as it was trained.

Nothing here imports torch: what is wrong with a command line is said before that.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# In task_specific_params, where T5 keeps its prefix.
DATA_OPTIONS = ("prefix", "keep_newlines", "max_source_tokens")
GENERATION_OPTIONS = (
    "num_beams", "max_new_tokens", "length_penalty", "min_new_tokens", "no_repeat_ngram_size",
    "do_sample",
)  # fmt: skip
_FIRST_GENERATION_OPTIONS = GENERATION_OPTIONS[:3]  # older exports have these alone
SAMPLING_OPTIONS = ("temperature", "top_k", "top_p")  # transformers refuses them without do_sample


def exported_options(folder: Path) -> dict[str, dict[str, Any]]:
    """The options, by section, that `export_to_hf` stored in a folder; {} for any other."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        generation = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
        stored = config["task_specific_params"]["summarization"]
        names = list(_FIRST_GENERATION_OPTIONS)
        names += [name for name in GENERATION_OPTIONS if name not in names and name in generation]
        names += [name for name in SAMPLING_OPTIONS if generation.get("do_sample")]
        return {
            "data": {name: stored[name] for name in DATA_OPTIONS},
            "evaluation": {name: generation[name] for name in names},
        }
    except (OSError, ValueError, KeyError, TypeError):
        return {}
