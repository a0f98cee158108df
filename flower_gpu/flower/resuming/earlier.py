"""Earlier runs that go on: their folders and settings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from flower_gpu.apps.folder import RunFolder
from flower_gpu.errors import ConfigError
from flower_gpu.printable import path_text

#: A key that only the settings of this command's runs have.
_KEYS: Final = {"simulate": "num_supernodes", "launch": "node_configs"}


def earlier_run(path: Path, command: str) -> tuple[RunFolder, dict[str, Any]]:
    """Return the folder of a run of a command that is to be resumed, and its settings.

    Raises ConfigError if it is no folder of such a run, or has no checkpoint.
    """
    folder = RunFolder(path.expanduser().resolve())
    if not folder.path.is_dir():
        raise ConfigError(f"--resume {path_text(path)}: there is no such folder")
    settings = folder.settings()
    if settings is None or _KEYS[command] not in settings:
        raise ConfigError(
            f"--resume {path_text(path)}: it has no {folder.trace.name} of `flower-gpu {command}`; the "
            "folder of such a run is needed, such as runs/2026-01-31_12-00-00"
        )
    if not folder.has_checkpoint:
        raise ConfigError(
            f"--resume {path_text(path)}: it has no checkpoint. One is written after each round of "
            "Flower's own strategies and of flower_gpu's FedAvg and FedBuff: start this run anew"
        )
    return folder, settings


def check_same_app(before: Mapping[str, Any], name: str, where: Path | None, resume: object) -> None:
    """Check that an earlier run, with these settings, is one of this app; raises ConfigError."""
    if before.get("app", name) != name:
        theirs = _shown(before["app"], before.get("app_folder"))
        raise ConfigError(
            f"--resume {path_text(str(resume))}: that is a run of {theirs}, not of {_shown(name, where)}. "
            "Give that app, or start a new run without --resume"
        )


def _shown(name: str, folder: object) -> str:
    return f"{name} ({path_text(str(folder))})" if folder else name
