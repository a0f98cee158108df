"""Which function a command of Flower's name stands for: what its script would call."""

from __future__ import annotations

import importlib
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flower_gpu.flower.commands import (
    COMMANDS,
    SERVER_COMMANDS,
    CommandFolder,
    flowers,
    function_of,
)
from flower_gpu.workers.forkserver.identity import script_folders


class NoEntryError(Exception):
    """A command is none of this Python environment's, or not one of Flower's."""


@dataclass(frozen=True)
class ProgramEntry:
    """What a command runs."""

    path: str  # its script
    module: str
    function: str

    def load(self) -> Callable[[], Any]:
        """Import it."""
        found: Any = importlib.import_module(self.module)
        for name in self.function.split("."):
            found = getattr(found, name)
        return found  # type: ignore[no-any-return]


def find(name: str, environ: Mapping[str, str]) -> ProgramEntry:
    """Return what the command of this name runs that is first on the ``PATH`` of an environment.

    Raises NoEntryError if it is not known what that does.
    """
    path = shutil.which(name, path=environ.get("PATH", os.defpath))
    if path is None:
        raise NoEntryError(f"there is no command {name}")
    folder, name = Path(path).parent, Path(path).name
    for commands in (COMMANDS, SERVER_COMMANDS, flowers()):
        if name in commands and folder == CommandFolder(commands).path:
            return ProgramEntry(path, *function_of(commands[name]))
    if name not in flowers() or folder not in map(Path, script_folders()):
        raise NoEntryError(f"{path} is another program")
    return ProgramEntry(path, *function_of(flowers()[name]))
