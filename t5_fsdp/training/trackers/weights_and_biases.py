"""Weights & Biases: a run on its server, or below run_dir/wandb until `wandb sync` sends it."""

from __future__ import annotations

import netrc
import secrets
import shlex
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import urlsplit

from t5_fsdp.training.trackers.tracker import DEFAULT_PROJECT, Ending, TrackedRun

_STEP = "trainer/step"
_ANSWER_SECONDS = 10.0


class WeightsAndBiases:
    """Logs to a W&B run.

    WANDB_MODE decides between online and offline. Where it says nothing the run is an offline one
    unless this machine is logged in and the server answers: asking for a key would stop it, and W&B
    gives up a run whose server it does not reach.
    """

    name = "Weights & Biases"

    def start(self, run: TrackedRun) -> str:
        import wandb

        settings = wandb.setup().settings
        why_offline = "" if _mode_is_given() else _why_offline(settings)
        run_id = run.known_id("wandb") or secrets.token_hex(4)
        self._run: Any = wandb.init(
            project=run.project or settings.project or DEFAULT_PROJECT,
            name=run.name,
            id=run_id,
            resume="allow",
            dir=str(run.run_dir),
            mode="offline" if why_offline else None,
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
            folder = shlex.quote(str(run.run_dir / "wandb"))
            why = f" ({why_offline})" if why_offline else ""
            return f"offline{why}; `wandb sync {folder}/offline-run-*` sends it to the server"
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


def _why_offline(settings: Any) -> str:
    """What keeps this machine from the server; empty when nothing does."""
    if not _has_credentials(settings):
        return "not logged in"
    try:
        urllib.request.urlopen(settings.base_url, timeout=_ANSWER_SECONDS).close()
    except urllib.error.HTTPError:  # an answer
        return ""
    except (OSError, ValueError) as error:
        return f"{settings.base_url} can't be reached: {error}"
    return ""


def _has_credentials(settings: Any) -> bool:
    """Whether this machine is logged in at the server, by a key, a token or ~/.netrc."""
    if settings.api_key or settings.identity_token_file:
        return True
    try:
        host = urlsplit(settings.base_url).hostname or ""
        return netrc.netrc().authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
