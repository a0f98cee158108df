"""Settings that a worker takes over from its caller. A worker that is a fork of the caller has them already.

A script sets up its process below ``if __name__ == "__main__":`` and expects its functions to find these
settings. A worker never runs this block. So the call carries the settings of the process, of ``logging``, and
of frameworks. A framework gets its settings as soon as the worker has imported it.

**Functions of ``__main__``** are pickled by value, so the worker does not need to import the script. The task
may start a process of its own with ``spawn`` or ``forkserver``. Then ``multiprocessing`` pickles the function
of that process by name, and the name has to exist in ``__main__``. So the worker gets a new ``__main__`` that
holds the functions of the call. Its ``__file__`` is the caller's script, which ``multiprocessing`` imports in
the new process, as it does for a process of the caller. The script does not run in the worker itself.

A table in docs/how-to/from-start-client.md lists the settings that a worker takes over, and those that it
does not. The worker never takes over the state of random number generators, because then all calls would draw
the same numbers.
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
    """Settings of a handler of the root logger that writes to a standard stream."""

    is_stdout: bool
    level: int
    formatter: logging.Formatter | None


@dataclass(frozen=True)
class CallerSettings:
    """The settings of a caller, in a form that can be sent to a worker."""

    #: Values by the names in :data:`~flower_gpu.workers.process_settings.SETTINGS`.
    process: Mapping[str, Any]
    #: Levels by logger name.
    log_levels: Mapping[str, int] = field(default_factory=dict)
    console: tuple[ConsoleHandler, ...] = ()
    #: Values of the settings of :meth:`Framework.taken_over`, by the name of the framework's module. The
    #: values stay pickled until the worker has imported the framework, because unpickling would import it.
    frameworks: Mapping[str, bytes] = field(default_factory=dict)

    @classmethod
    def of_this_process(cls, *, only_start_method: bool = False) -> CallerSettings:
        """Collect the settings of this process. A setting that each thread has is read in this thread.

        ``only_start_method``: collect only the start method of ``multiprocessing``.
        """
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
        """Apply the settings to this worker. A framework that the block imports gets its settings then."""
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
                logging.root.addHandler(_new_handler(handler))
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
        # A derived class may be impossible to pickle. A handler with filters is left out, because the worker
        # would not have the filters, and the format may need fields that they add.
        if type(handler) is logging.StreamHandler and not handler.filters and (is_stdout or is_stderr):
            yield ConsoleHandler(is_stdout, handler.level, _picklable(handler.formatter))


def _picklable(formatter: logging.Formatter | None) -> logging.Formatter | None:
    """Return the formatter if a worker can use it, or None for the default formatter."""
    if type(formatter) is not logging.Formatter:
        return None
    try:
        formatter.format(logging.makeLogRecord({}))
        pickle.dumps(formatter)
    except Exception:  # a format with the user's own fields, or a default that cannot be pickled
        return None
    return formatter


def _new_handler(settings: ConsoleHandler) -> logging.Handler:
    handler = logging.StreamHandler(sys.stdout if settings.is_stdout else sys.stderr)
    handler.setLevel(settings.level)
    handler.setFormatter(settings.formatter)
    return handler


@dataclass
class MainModule:
    """The part of the caller's ``__main__`` that a call needs.

    The pickler adds to ``contents`` while it pickles the other parts of a request. So this object must be
    pickled last.
    """

    file: str | None = None  # path of the script, or None in a notebook
    module: str | None = None  # name of the module that was started with ``python -m``, or None
    contents: dict[str, Any] = field(default_factory=dict)  # functions and classes that travel with the call

    @classmethod
    def of_this_process(cls) -> MainModule:
        """Return a description of this process's ``__main__``, with ``contents`` still empty."""
        main = sys.modules["__main__"]
        file = getattr(main, "__file__", None)
        module = getattr(getattr(main, "__spec__", None), "name", None)
        with suppress(OSError):  # the working directory was removed
            file = str(Path(file).absolute()) if file else None
        return cls(file, module)

    def note(self, pickled: Any) -> None:
        """Add an object that is being pickled to ``contents``, if it is a global of ``__main__``."""
        if isinstance(pickled, FunctionType | type) and pickled.__module__ == "__main__":
            name = pickled.__qualname__
            if getattr(sys.modules["__main__"], name, None) is pickled:
                self.contents[name] = pickled

    def install(self) -> None:
        """Replace this worker's ``__main__`` by a module that holds the contents, if there are any."""
        if not self.contents:
            return
        main = ModuleType("__main__")
        main.__file__ = self.file
        main.__spec__ = ModuleSpec(self.module, None) if self.module else None
        vars(main).update(self.contents)
        sys.modules["__main__"] = main
