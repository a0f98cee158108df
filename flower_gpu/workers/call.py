"""What a worker is asked to do. Shared by the caller's and the worker's side."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from flower_gpu.errors import ConfigError, WorkerStartError

#: A function, or where to find it: ``"package.module:function"``.
Task = Callable[..., Any] | str

_REFERENCE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


@dataclass(frozen=True)
class Call:
    """One call of one task."""

    task: Task  # the function, or ``"package.module:function"``: then only the worker imports it
    # args, kwargs: Its arguments: numpy arrays, plain Python values, or anything cloudpickle takes
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    # The worker's environment variables, set before anything heavy is imported
    env: Mapping[str, str] = field(default_factory=dict)
    # ``"package.module:function"``, called without arguments before the task is loaded. If it returns a
    # context manager, the task is loaded and run inside of that.
    setup: str | None = None
    label: str = "call"  # names the call in messages, for example ``"fit of client 3"``
    # What the worker finds loaded: ``"package.module:function"`` with keyword arguments for it
    preload: Sequence[tuple[str, Mapping[str, Any]]] = ()
    held: int = -1  # descriptor that the worker keeps open until it is gone; -1 for none
    # Top-level names of libraries for which the worker has no use, so that a fork server without them will
    # do. Forks of a process that has not imported torch take half the time.
    without: frozenset[str] = frozenset()
    # Put in front of log lines, Flower's and ours, of the task; for example ``"client 3, round 2: "``
    log_prefix: str = ""

    def __post_init__(self) -> None:
        check_task(self.task)


def check_task(task: Task) -> None:
    """Refuse what cannot be a task, where the user wrote it and not later in a worker.

    Raises ConfigError if ``task`` is neither callable nor of the form ``"package.module:function"``.
    """
    if isinstance(task, str):
        if not _REFERENCE.fullmatch(task):
            raise ConfigError(f"{task!r} does not name a function; write it as 'package.module:function'")
    elif not callable(task):
        raise ConfigError(
            f"a task is a function or a 'package.module:function' string, not {type(task).__name__}"
        )


def task_name(task: Task) -> str:
    """Return a short name of ``task`` for messages."""
    if isinstance(task, str):
        return task
    return getattr(task, "__qualname__", None) or type(task).__qualname__


def load_task(task: Task) -> Callable[..., Any]:
    """Return the function itself, importing it where only its name was given.

    Raises WorkerStartError if the module has no such function, or importing it failed (the cause tells
    where).
    """
    if not isinstance(task, str):
        return task
    module_name, _, path = task.partition(":")
    try:
        found: Any = import_module(module_name)
    except Exception as error:
        raise WorkerStartError(
            f"cannot import the task {task!r}: {type(error).__name__}: {error}. "
            "The worker searches the caller's sys.path"
        ) from error
    for name in path.split("."):
        if not hasattr(found, name):
            raise WorkerStartError(f"module {module_name!r} has no {path!r} (task {task!r})")
        found = getattr(found, name)
    if not callable(found):
        raise WorkerStartError(f"{task!r} is a {type(found).__name__}, not a function")
    return found  # type: ignore[no-any-return]


def set_up(setup: str | None) -> AbstractContextManager[Any]:
    """Call what a call names as its ``setup``, and return what its task runs in.

    Raises WorkerStartError if there is no such function.
    """
    made = load_task(setup)() if setup is not None else None
    return made if isinstance(made, AbstractContextManager) else nullcontext()
