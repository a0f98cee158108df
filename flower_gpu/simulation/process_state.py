"""The settings of a worker's process, restored so that each client finds the settings of the first client.

Two tables of :mod:`flower_gpu.workers.process_settings` list settings of the interpreter and of the kernel.
Frameworks add their own flags. Modules and their globals are not restored.

Settings are restored when the next message begins, because threads of an earlier client may change them until
then. But a process may lack the permission to restore its niceness or its limits. So these settings are
restored when a message ends. If this fails, the next message gets a new worker.
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
        """Restore the settings that may need a permission. Return False if a setting stays changed."""
        try:
            return all(_restore(setting, value) or setting.get() == value for setting, value in self._lasting)
        except (OSError, ValueError):
            return False


def _values(settings: Any) -> list[tuple[Setting, Any]]:
    values = []
    for setting in settings:
        # Skip a setting that cannot be read. For example, some flags of PyTorch have two names. PyTorch
        # refuses to read such a flag by one name if it was set by the other name.
        with suppress(RuntimeError, AttributeError, TypeError):
            values.append((setting, setting.get()))
    return values


def _restore(setting: Setting, value: Any) -> bool:
    """Restore one setting. Return True if the setting already had the value."""
    # try is used instead of suppress(), which would take as long as the rest of this function.
    try:
        if setting.get() == value:
            return True
    except (RuntimeError, AttributeError, FileNotFoundError):
        # FileNotFoundError means that the current folder was removed.
        pass
    setting.set(value)
    return False
