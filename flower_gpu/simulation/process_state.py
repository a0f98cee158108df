"""The state of a worker's process: each client finds the state that the first client found.

Modules and their globals stay as they are. Two tables of :mod:`flower_gpu.workers.process_settings` have the
settings of the interpreter and of the kernel, and frameworks add their own flags. Settings are restored when
the next message begins, because threads of an earlier client may change them in between. A process may be
unable to restore its niceness or its limits. So these are restored when a message ends, and if that fails,
the next message gets a new worker.
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
    """The settings that this process has when the object is made."""

    def __init__(self) -> None:
        of_frameworks = (framework.settings() for framework in frameworks.loaded())
        self._found = _values(chain(SETTINGS.values(), *of_frameworks))
        self._lasting = _values(LASTING.values())

    def restore(self) -> None:
        """Restore all settings."""
        faulthandler.cancel_dump_traceback_later()
        for setting, value in self._found:
            _restore(setting, value)

    def can_be_restored(self) -> bool:
        """Restore the settings that may resist; return False if one of them does."""
        try:
            return all(_restore(each, value) or each.get() == value for each, value in self._lasting)
        except (OSError, ValueError):
            return False


def _values(settings: Any) -> list[tuple[Setting, Any]]:
    found = []
    for setting in settings:
        # PyTorch refuses to read a flag by one of its two names if it was set by the other one.
        with suppress(RuntimeError, AttributeError, TypeError):
            found.append((setting, setting.get()))
    return found


def _restore(setting: Setting, value: Any) -> bool:
    """Restore one setting; return True if it had the value already."""
    try:  # not suppress(), which takes as long as the rest of this function
        if setting.get() == value:
            return True
    except (RuntimeError, AttributeError, FileNotFoundError):  # the last one: the folder was removed
        pass
    setting.set(value)
    return False
