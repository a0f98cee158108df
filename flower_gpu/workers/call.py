"""A call: its task and its preloaded data. The caller and the worker both use this module."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flower_gpu.errors import ConfigError, WorkerStartError
from flower_gpu.workers.own_process import facts

if TYPE_CHECKING:
    from flower_gpu.workers.confinement import Confinement
    from flower_gpu.workers.output import AdmitLines

#: A function, or where to find it: ``"package.module:function"``.
Task = Callable[..., Any] | str

_REFERENCE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


@dataclass(frozen=True)
class Call:
    """One call of one task."""

    # The function, or ``"package.module:function"``, which only the worker imports.
    task: Task
    # args and kwargs: numpy arrays, plain Python values, or anything else that cloudpickle accepts.
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    # Environment variables of the worker, set before libraries are imported.
    env: Mapping[str, str] = field(default_factory=dict)
    # ``"package.module:function"``, called without arguments before the task is loaded. If it returns a
    # context manager, the task is loaded and run within it.
    setup: str | None = None
    # Name of the call in messages, for example ``"fit of client 3"``.
    label: str = "call"
    # Functions that load data before the task runs: ``"package.module:function"`` with keyword arguments.
    preload: Sequence[tuple[str, Mapping[str, Any]]] = ()
    # Descriptor of the ticket of the call's lease, -1 without a lease. It stays open until the worker is
    # gone, because the worker holds it, too, unless it is confined. A caller that does not wait for the
    # worker's exit keeps it open as well.
    lease_descriptor: int = -1
    # Top-level names of libraries that the worker does not need, so that it can use a fork server without
    # them. Forks of a process that has not imported torch take half the time.
    without: frozenset[str] = frozenset()
    # Text in front of the task's log lines, both Flower's and ours, for example ``"client 3, round 2: "``.
    log_prefix: str = ""
    # If set, all lines that the task writes begin with ``log_prefix`` and go into a file of the run. Admitted
    # lines are shown as well.
    admit_lines: AdmitLines | None = None
    # Rights of a confined worker on this host. If set, data from the worker is never unpickled.
    confinement: Confinement | None = None
    # True if the worker takes over the caller's settings, see :mod:`flower_gpu.workers.caller_settings`. The
    # start method of multiprocessing is taken over in any case.
    takes_over: bool = False

    def __post_init__(self) -> None:
        check_task(self.task)

    @property
    def keys(self) -> list[str]:
        """Return the key of the task, and the key of the user's task if that is its first argument."""
        is_task = [callable(argument) or _is_reference(argument) for argument in self.args[:1]]
        return [task_key(self.task), *(task_key(argument) for argument in compress(self.args, is_task))]


def _is_reference(value: Any) -> bool:
    return isinstance(value, str) and _REFERENCE.fullmatch(value) is not None


def check_task(task: Task) -> None:
    """Raise ConfigError if this cannot be a task, so that the user sees the error before a worker starts."""
    if isinstance(task, str):
        if not _is_reference(task):
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


def task_key(task: Task) -> str:
    """Return a unique name of ``task``, such as ``"package.module:function"``.

    Different programs may have modules of the same name. So a module in the folder of the running script is
    named by its path, and ``__main__`` by the path of the script.
    """
    if isinstance(task, partial):
        return task_key(task.func)
    if isinstance(task, str):
        module, _, name = task.partition(":")
    else:
        described = task if hasattr(task, "__qualname__") else type(task)
        module, name = str(described.__module__), described.__qualname__
    return f"{_place_of(module)}:{name}"


def _place_of(module: str) -> str:
    file = getattr(sys.modules["__main__"], "__file__", None)
    try:
        # In a notebook or an interactive interpreter, modules lie in the working directory.
        place = Path(file or "__main__").resolve()
    except FileNotFoundError:  # the working directory was removed
        return module
    if module == "__main__" and file:
        return str(place)
    folder = place.parent
    top = module.partition(".")[0]
    # Path.exists() would raise an error if the folder cannot be searched.
    is_beside = any(os.access(folder / name, os.F_OK) for name in (f"{top}.py", f"{top}/__init__.py"))
    return str(folder / module) if is_beside or module == "__main__" else module


def load_task(task: Task) -> Callable[..., Any]:
    """Return the function of a task, imported if it is given by name; WorkerStartError if that fails."""
    if not isinstance(task, str):
        return task
    module_name, _, path = task.partition(":")
    try:
        loaded: Any = import_module(module_name)
    except Exception as error:
        raise WorkerStartError(
            f"cannot import the task {task!r}: {type(error).__name__}: {error}. "
            "The worker searches the caller's sys.path"
        ) from error
    for name in path.split("."):
        if not hasattr(loaded, name):
            raise WorkerStartError(f"module {module_name!r} has no {path!r} (task {task!r})")
        loaded = getattr(loaded, name)
    if not callable(loaded):
        raise WorkerStartError(f"{task!r} is a {type(loaded).__name__}, not a function")
    return loaded  # type: ignore[no-any-return]


def set_up(setup: str | None) -> AbstractContextManager[Any]:
    """Call the ``setup`` function of a call, and return the context manager for its task."""
    made = load_task(setup)() if setup is not None else None
    return made if isinstance(made, AbstractContextManager) else nullcontext()


#: Names of the user's functions with their keyword arguments. A fork server runs each function once, so that
#: all workers forked from it share the loaded data.
Preload = Sequence[tuple[str, Mapping[str, Any]]]


def checked_preload(preload: Any) -> tuple[tuple[str, dict[str, Any]], ...]:
    """Return ``preload`` as a tuple of names with keyword arguments; ConfigError for an invalid value.

    ``preload``: ``"package.module:function"``, the same with a dict of keyword arguments,
    ``"package.module"``, or several of these.
    """
    if preload is None:
        return ()
    if isinstance(preload, str) or _is_pair(preload):
        preload = [preload]
    return tuple(_entry(entry) for entry in preload)


def check_modules(preload: Preload, path: Sequence[str]) -> None:
    """Raise ConfigError if a module cannot be found. No code of the modules runs.

    ``path``: folders that come before ``sys.path`` in the importing process.
    """
    for name, _ in preload:
        module = name.partition(":")[0]
        if not _is_there(module, [*path, *sys.path]):
            raise ConfigError(
                f"{name!r}: there is no module {module!r}. Write package.module:function, of the app "
                "or of an installed package"
            )


def _is_there(module: str, path: Sequence[str]) -> bool:
    """Return True if a module can be found, or if only its import would show that. Imports nothing."""
    place: Sequence[str] | None = path
    parts = module.split(".")
    for count in range(1, len(parts) + 1):
        # The name before the dot is a module, not a package.
        if place is None:
            return False
        name = ".".join(parts[:count])
        try:
            specs = (finder.find_spec(name, place) for finder in sys.meta_path)
            spec = next((spec for spec in specs if spec is not None), None)
        except Exception:
            return True
        if spec is None:
            return False
        place = spec.submodule_search_locations
    return True


def run_preload(preload: Preload) -> None:
    """Import the modules and call the functions."""
    for name, kwargs in preload:
        if ":" in name:
            load_task(name)(**kwargs)
        else:
            import_module(name)


def run_preload_once(preload: Preload) -> None:
    """Do the same, but skip entries that have already run in this process."""
    for name, kwargs in preload:
        key = json.dumps([name, kwargs])
        if key not in facts.preloaded:
            run_preload([(name, kwargs)])
            facts.preloaded.add(key)


def _is_pair(value: Any) -> bool:
    return (
        isinstance(value, tuple | list)
        and len(value) == 2
        and isinstance(value[0], str)
        and isinstance(value[1], Mapping)
    )


def _entry(entry: Any) -> tuple[str, dict[str, Any]]:
    name, kwargs = entry if _is_pair(entry) else (entry, {})
    if not isinstance(name, str):
        raise ConfigError(
            "preload takes 'package.module:function', or such a name with a dict of keyword arguments, "
            f"not {entry!r}"
        )
    check_task(name if ":" in name else f"{name}:_")
    if kwargs and ":" not in name:
        raise ConfigError(f"preload {name!r} is a module and takes no arguments; name a function in it")
    try:
        json.dumps(kwargs)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"preload {name!r}: its arguments must be plain values ({error})") from None
    return name, dict(kwargs)
