"""Fine-tune Hugging Face T5 for summarization with PyTorch Fully Sharded Data Parallel."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from t5_fsdp.api import (
        EvaluationResult,
        TrainResult,
        evaluate,
        load_config,
        plan,
        summarize,
        train,
    )
    from t5_fsdp.config import Config
    from t5_fsdp.errors import PeerFailed, Preempted, UserError

__version__ = "0.1.0"
__all__ = [
    "Config",
    "EvaluationResult",
    "PeerFailed",
    "Preempted",
    "TrainResult",
    "UserError",
    "evaluate",
    "load_config",
    "plan",
    "summarize",
    "train",
]
_ERRORS = dict.fromkeys(("PeerFailed", "Preempted", "UserError"), "t5_fsdp.errors")
_MODULES = {"Config": "t5_fsdp.config", **_ERRORS}


def __getattr__(name: str) -> Any:
    # Imported when asked for: a command's --help needs none of it.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES.get(name, "t5_fsdp.api")), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
