"""Whether what the options name is there at all: asked before torch is imported, which is slow."""

from __future__ import annotations

from pathlib import Path

from t5_fsdp.config import Config
from t5_fsdp.errors import UserError
from t5_fsdp.files import looks_like_path, not_a_folder


def check_paths(config: Config) -> None:
    """Refuse folders that a training run reads, beside its data, and that are not there.

    Raises:
        UserError: with all of them.
    """
    model, resume = config.model, config.checkpoint.resume
    problems = []
    if resume not in ("auto", "never") and not Path(resume).is_dir():
        problems.append(f"checkpoint.resume: {not_a_folder(resume)}")
    for option, name in (("model.name", model.name), ("model.tokenizer", model.tokenizer)):
        if name and looks_like_path(name) and not Path(name).expanduser().exists():
            problems.append(
                f"{option}: {name} does not exist; check the path, or give a Hub id (owner/name)"
            )
    if problems:
        raise UserError(*problems)
