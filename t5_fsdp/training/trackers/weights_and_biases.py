"""Weights & Biases: a run on its server, or below run_dir/wandb until `wandb sync` sends it."""

from __future__ import annotations

import netrc
import secrets
from typing import Any
from urllib.parse import urlsplit

from t5_fsdp.training.trackers.tracker import DEFAULT_PROJECT, Ending, TrackedRun

_STEP = "trainer/step"


class WeightsAndBiases:
    """Logs to a W&B run.

    WANDB_MODE decides between online and offline. Where it says nothing and nobody has logged in on
    this machine the run is an offline one: asking for a key would stop it.
    """

    name = "Weights & Biases"

    def start(self, run: TrackedRun) -> str:
        import wandb

        settings = wandb.setup().settings
        run_id = run.known_id("wandb") or secrets.token_hex(4)
        self._run: Any = wandb.init(
            project=run.project or settings.project or DEFAULT_PROJECT,
            name=run.name,
            id=run_id,
            resume="allow",
            dir=str(run.run_dir),
            mode=None if _mode_is_given() or _has_credentials(settings) else "offline",
            config=run.config,
            # Several runs of one process are several runs.
            reinit="create_new",
            # What is printed is in log.txt.
            settings=wandb.Settings(silent=True, console="off", save_code=False),
        )
        run.remember_id("wandb", run_id)
        # W&B drops what comes for an earlier step than its last one, which a resume does.
        self._run.define_metric(_STEP)
        self._run.define_metric("*", step_metric=_STEP)
        if self._run.offline:
            folder = run.run_dir / "wandb"
            return f"offline; `wandb sync {folder}/offline-run-*` sends it to the server"
        return str(self._run.url or "")

    def log(self, step: int, figures: dict[str, float]) -> None:
        self._run.log({_STEP: step, **figures})

    def log_text(self, step: int, name: str, markdown: str) -> None:
        import html

        import wandb

        self._run.log({_STEP: step, name: wandb.Html(f"<pre>{html.escape(markdown)}</pre>")})

    def finish(self, ending: Ending) -> None:
        self._run.finish(exit_code=1 if ending == "failed" else 0)


def _mode_is_given() -> bool:
    import wandb

    return "mode" in wandb.setup().settings.model_fields_set


def _has_credentials(settings: Any) -> bool:
    """Whether this machine is logged in at the server, by a key, a token or ~/.netrc."""
    if settings.api_key or settings.identity_token_file:
        return True
    try:
        host = urlsplit(settings.base_url).hostname or ""
        return netrc.netrc().authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
