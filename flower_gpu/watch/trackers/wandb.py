"""Weights & Biases: online, or offline with ``WANDB_MODE=offline``."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from netrc import NetrcParseError, netrc
from typing import Any, Final
from urllib.parse import urlsplit

from flower_gpu.apps.folder import short
from flower_gpu.errors import ConfigError
from flower_gpu.watch.trackers.points import Point, TrackedRun

_OFFLINE: Final = ("offline", "dryrun", "disabled")
_FAILURES: Final = "failures"  # in the summary
_NO_KEY: Final = (
    "tracker wandb: there is no API key of Weights & Biases on this machine. Run `wandb login` once, or set "
    "WANDB_API_KEY; WANDB_MODE=offline keeps the run in its folder, and `wandb sync` sends it later"
)


class WandB:
    """A run of its own beside runs that the app may have; nothing of the output is captured."""

    def __init__(self) -> None:
        import wandb

        self._wandb: Any = wandb
        self._is_online = os.environ.get("WANDB_MODE", "online") not in _OFFLINE
        if self._is_online and not _has_key(wandb):
            raise ConfigError(_NO_KEY)
        self._has_other = wandb.run is not None
        # Here and not in start(): the service process is there before the first one of the run, so that the
        # end of the run's processes leaves it alone.
        wandb.setup().ensure_service()
        self._axes: set[str] = set()

    def start(self, run: TrackedRun) -> Mapping[str, str]:
        """Open the run, or go on with it."""
        id_ = run.ids.get("id") or secrets.token_hex(4)
        self._run = self._wandb.init(
            id=id_,
            name=run.folder.path.name,
            project=os.environ.get("WANDB_PROJECT") or run.app,
            dir=os.environ.get("WANDB_DIR") or str(run.folder.path),
            config=dict(run.config),
            resume="allow" if run.ids else None,
            reinit="create_new",
            settings=self._wandb.Settings(
                console="off", silent=True, x_disable_stats=True, disable_code=True, disable_git=True
            ),
        )
        if run.ids:
            self._run.config.update(dict(run.config), allow_val_change=True)
        url = self._run.url if self._is_online else None
        return {
            "id": id_,
            "see": url or f"wandb sync {short(run.folder.path)}/wandb/offline-run-*-{id_}",
        }

    def log(self, points: Sequence[Point]) -> None:
        """Take figures, and failed messages into the summary."""
        for point in points:
            if point.failure:
                before = self._run.summary.get(_FAILURES)
                self._run.summary[_FAILURES] = "\n".join(filter(None, [before, point.failure]))
                continue
            for group in {name.partition("/")[0] for name in point.values} - self._axes:
                self._axes.add(group)
                self._run.define_metric(f"{group}/*", step_metric=point.axis)
            self._run.log({**point.values, point.axis: point.step}, step=point.number)

    def close(self, outcome: str) -> None:
        """End the run."""
        if outcome:
            self._run.summary["outcome"] = outcome
        self._run.finish(exit_code=0 if outcome == "completed" else 1)
        if not self._has_other:
            self._wandb.teardown()  # it ends the service process


def _has_key(wandb: Any) -> bool:
    """Tell whether a run can begin without a question in the terminal; ``wandb.login`` asks the network."""
    settings = wandb.setup().settings
    if settings.api_key or settings.identity_token_file:
        return True
    host = urlsplit(settings.base_url).hostname or ""
    try:
        return netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, NetrcParseError):
        return False
