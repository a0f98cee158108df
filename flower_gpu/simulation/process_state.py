"""The state of a worker's process: each client finds the state that the first client found.

Modules and their globals persist. Two tables of :mod:`flower_gpu.workers.process_settings` list settings of
the interpreter and of the kernel. Frameworks add their own flags.

Settings are restored when the next message begins, because threads of an earlier client may change them until
then. A process may lack the permission to restore its niceness or its limits. So these are restored when a
message ends. If this fails, the next message gets a new worker.
"""

from __future__ import annotations

import faulthandler
from contextlib import suppress
from itertools import chain
from typing import Any

from flower_gpu import frameworks
from flower_gpu.frameworks.framework import Setting
from flower_gpu.workers.process_settings import LASTING, SETTINGS


class ProcessState:
    """A snapshot of the settings of this process, taken when the object is created."""

    def __init__(self) -> None:
        of_frameworks = (framework.settings() for framework in frameworks.loaded())
        self._initial = _values(chain(SETTINGS.values(), *of_frameworks))
        self._lasting = _values(LASTING.values())

    def restore(self) -> None:
        """Restore all settings."""
        faulthandler.cancel_dump_traceback_later()
        for setting, value in self._initial:
            _restore(setting, value)

    def can_be_restored(self) -> bool:
        """Restore the settings that this process may be unable to restore. Return False if one fails."""
        try:
            return all(_restore(setting, value) or setting.get() == value for setting, value in self._lasting)
        except (OSError, ValueError):
            return False


def _values(settings: Any) -> list[tuple[Setting, Any]]:
    values = []
    for setting in settings:
        # PyTorch refuses to read a flag by one of its two names if it was set by the other one.
        with suppress(RuntimeError, AttributeError, TypeError):
            values.append((setting, setting.get()))
    return values


def _restore(setting: Setting, value: Any) -> bool:
    """Restore one setting; return True if it had the value already."""
    # suppress() would take as long as the rest of this function.
    try:
        if setting.get() == value:
            return True
    except (RuntimeError, AttributeError, FileNotFoundError):
        # FileNotFoundError means that the current folder was removed.
        pass
    setting.set(value)
    return False
