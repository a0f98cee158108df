"""Settings that a worker takes over from its caller, unless the worker begins as a copy of the caller.

A script sets up its process below ``if __name__ == "__main__":`` and expects its functions to find these
settings. A worker never runs this block, so the settings travel with the call: settings of the process, of
``logging``, and of frameworks. A framework gets its settings as soon as the worker has imported it.

**Functions of ``__main__``** travel by value and belong to no module of the worker. A process that the task
starts with ``spawn`` or ``forkserver`` gets its function by name, however. So the worker gets a ``__main__``
in which ``pickle`` finds the functions of the call, and whose ``__file__`` is the caller's script.
``multiprocessing`` then imports the script in the new process, as for a process of the caller. The script
does not run in the worker.

A table of docs/how-to/from-start-client.md lists all settings, with those that stay behind. The state of
random number generators stays behind, because each call would draw the same numbers.
"""

from __future__ import annotations

import logging
import pickle
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from flower_gpu import frameworks
from flower_gpu.frameworks.framework import Framework
from flower_gpu.workers.process_settings import SETTINGS, TAKEN_OVER


@dataclass(frozen=True)
class ConsoleHandler:
    """A handler of the root logger that writes to a standard stream."""

    is_stdout: bool
    level: int
    formatter: logging.Formatter | None


@dataclass(frozen=True)
class CallerSettings:
    """The settings of a caller, in a form that can travel."""

    #: Values by names of :data:`~flower_gpu.workers.process_settings.SETTINGS`.
    process: Mapping[str, Any]
    #: Levels by names of loggers.
    log_levels: Mapping[str, int] = field(default_factory=dict)
    console: tuple[ConsoleHandler, ...] = ()
    #: Values of :meth:`Framework.taken_over` by the framework's module. They are pickles, because reading one
    #: imports the framework.
    frameworks: Mapping[str, bytes] = field(default_factory=dict)

    @classmethod
    def of_this_process(cls, *, only_start_method: bool = False) -> CallerSettings:
        """Collect the settings of this process, and of this thread where a thread has its own."""
        if only_start_method:
            name = "`multiprocessing`'s start method"
            return cls({name: SETTINGS[name].get()})
        return cls(
            {name: SETTINGS[name].get() for name in TAKEN_OVER},
            _log_levels(),
            tuple(_console_handlers()),
            {framework.module: _values(framework) for framework in frameworks.loaded()},
        )

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Apply the settings to this worker. Frameworks get theirs when the block imports them."""
        for name, value in self.process.items():
            setting = SETTINGS[name]
            if setting.get() != value:
                # The task can run without this setting, for example if the worker lacks a locale.
                with suppress(Exception):
                    setting.set(value)
        for name, level in self.log_levels.items():
            logging.getLogger(name).setLevel(level)
        if not logging.root.handlers:
            for handler in self.console:
                logging.root.addHandler(_made(handler))
        with frameworks.each_loaded(self._apply_to):
            yield

    def _apply_to(self, framework: Framework, _is_new: bool) -> None:
        if (data := self.frameworks.get(framework.module)) is None:
            return
        # Both processes have the same version of the framework, so the settings come in the same order.
        for setting, value in zip(framework.taken_over(), pickle.loads(data), strict=False):
            if setting.get() != value:
                setting.set(value)


def _values(framework: Framework) -> bytes:
    return pickle.dumps([setting.get() for setting in framework.taken_over()])


def _log_levels() -> dict[str, int]:
    loggers = list(logging.root.manager.loggerDict.items())
    return {
        name: logger.level for name, logger in loggers if isinstance(logger, logging.Logger) and logger.level
    }


def _console_handlers() -> Iterator[ConsoleHandler]:
    for handler in logging.root.handlers:
        is_stdout = getattr(handler, "stream", None) in (sys.stdout, sys.__stdout__)
        is_stderr = getattr(handler, "stream", None) in (sys.stderr, sys.__stderr__)
        # Derived classes may be unable to travel. Filters stay behind, and the format may need their fields.
        if type(handler) is logging.StreamHandler and not handler.filters and (is_stdout or is_stderr):
            yield ConsoleHandler(is_stdout, handler.level, _that_travels(handler.formatter))


def _that_travels(formatter: logging.Formatter | None) -> logging.Formatter | None:
    """Return a formatter that another process can use, or None for the default one."""
    if type(formatter) is not logging.Formatter:
        return None
    try:
        formatter.format(logging.makeLogRecord({}))
        pickle.dumps(formatter)
    except Exception:  # a format with the user's own fields, or a default that cannot be pickled
        return None
    return formatter


def _made(handler: ConsoleHandler) -> logging.Handler:
    made = logging.StreamHandler(sys.stdout if handler.is_stdout else sys.stderr)
    made.setLevel(handler.level)
    made.setFormatter(handler.formatter)
    return made


@dataclass
class MainModule:
    """The part of the caller's ``__main__`` that a call needs.

    The pickler fills ``contents`` while it writes the rest of a request, so this must be its last part.
    """

    file: str | None = None  # path of the script, or None in a notebook
    module: str | None = None  # name of the module that was started with ``python -m``, or None
    contents: dict[str, Any] = field(default_factory=dict)  # functions and classes that travel with the call

    @classmethod
    def of_this_process(cls) -> MainModule:
        """Describe this process's ``__main__``, without contents."""
        main = sys.modules["__main__"]
        file = getattr(main, "__file__", None)
        module = getattr(getattr(main, "__spec__", None), "name", None)
        with suppress(OSError):  # the working directory was removed
            file = str(Path(file).absolute()) if file else None
        return cls(file, module)

    def note(self, pickled: Any) -> None:
        """Keep a function or class that is being pickled, if it is an attribute of ``__main__``."""
        if isinstance(pickled, FunctionType | type) and pickled.__module__ == "__main__":
            name = pickled.__qualname__
            if getattr(sys.modules["__main__"], name, None) is pickled:
                self.contents[name] = pickled

    def install(self) -> None:
        """Have this worker find the contents in ``__main__``."""
        if not self.contents:
            return
        main = ModuleType("__main__")
        main.__file__ = self.file
        main.__spec__ = ModuleSpec(self.module, None) if self.module else None
        vars(main).update(self.contents)
        sys.modules["__main__"] = main
