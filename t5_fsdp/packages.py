"""Which packages are installed, without importing them."""

from __future__ import annotations

import importlib.util


def is_installed(name: str) -> bool:
    """Whether a package can be imported.

    A folder of that name in the working directory counts as a package to Python, one without
    content, but not here: runs leave folders such as `wandb` behind.
    """
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None
