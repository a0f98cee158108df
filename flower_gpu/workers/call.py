"""A call: its task, and the data loaded before that. Shared by the caller's and the worker's side."""

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
    # Descriptor of its lease's ticket, -1 for none. It stays open until the worker is gone: in the worker,
    # unless that is confined, and in a caller that does not wait for the worker's end
    held: int = -1
    # Top-level names of libraries for which the worker has no use, so that a fork server without them will
    # do. Forks of a process that has not imported torch take half the time.
    without: frozenset[str] = frozenset()
    # Put in front of log lines, Flower's and ours, of the task; for example ``"client 3, round 2: "``
    log_prefix: str = ""
    # If set, all lines that the task writes begin with ``log_prefix`` and stand in a file of the run. Those
    # that it admits are shown as well.
    admit_lines: AdmitLines | None = None
    # What its worker keeps of this host: then nothing that comes from the worker is unpickled
    confinement: Confinement | None = None
    # Whether its worker takes over the caller's settings, see :mod:`flower_gpu.workers.caller_settings`. The
    # start method of multiprocessing is taken over in any case.
    takes_over: bool = False

    def __post_init__(self) -> None:
        check_task(self.task)

    @property
    def keys(self) -> list[str]:
        """Keys of its task, and of the user's task if that is the first argument of one of ours."""
        is_task = [callable(each) or _is_reference(each) for each in self.args[:1]]
        return [task_key(self.task), *(task_key(each) for each in compress(self.args, is_task))]


def _is_reference(value: Any) -> bool:
    return isinstance(value, str) and _REFERENCE.fullmatch(value) is not None


def check_task(task: Task) -> None:
    """Raise ConfigError if this cannot be a task: at the user's line of code, not later in a worker."""
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
    """Return a name that tells ``task`` from tasks of other programs, ``"package.module:function"``.

    Modules of different programs may have the same name. So a module that lies beside the script that runs is
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
        # In a notebook or an interpreter, modules lie in the working directory.
        place = Path(file or "__main__").resolve()
    except FileNotFoundError:  # the working directory was removed
        return module
    if module == "__main__" and file:
        return str(place)
    folder = place.parent
    top = module.partition(".")[0]
    # Not Path.exists(): that raises an error for a folder that cannot be searched.
    is_beside = any(os.access(folder / each, os.F_OK) for each in (f"{top}.py", f"{top}/__init__.py"))
    return str(folder / module) if is_beside or module == "__main__" else module


def load_task(task: Task) -> Callable[..., Any]:
    """Return the function itself, imported where only its name was given; else WorkerStartError."""
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
    """Call the ``setup`` function of a call, and return the context of its task."""
    made = load_task(setup)() if setup is not None else None
    return made if isinstance(made, AbstractContextManager) else nullcontext()


#: Functions of the user's with their keyword arguments, in a form that can travel. They run once where
#: workers are forked from, so that all find what they load.
Preload = Sequence[tuple[str, Mapping[str, Any]]]


def checked_preload(preload: Any) -> tuple[tuple[str, dict[str, Any]], ...]:
    """Bring the forms of ``preload`` into one; ConfigError for anything else.

    ``preload``: ``"package.module:function"``, or with its keyword arguments, or ``"package.module"``.
    """
    if preload is None:
        return ()
    if isinstance(preload, str) or _is_pair(preload):
        preload = [preload]
    return tuple(_entry(entry) for entry in preload)


def check_modules(preload: Preload, path: Sequence[str]) -> None:
    """Look for the modules, and run none of their code; ConfigError if one is nowhere to be found.

    ``path``: what comes before ``sys.path`` where they will be imported.
    """
    for name, _ in preload:
        module = name.partition(":")[0]
        if not _is_there(module, [*path, *sys.path]):
            raise ConfigError(
                f"{name!r}: there is no module {module!r}. Write package.module:function, of the app "
                "or of an installed package"
            )


def _is_there(module: str, path: Sequence[str]) -> bool:
    """Tell whether a module can be found, also where only its import can tell; imports nothing itself."""
    place: Sequence[str] | None = path
    parts = module.split(".")
    for count in range(1, len(parts) + 1):
        if place is None:  # what is before the dot is no package
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
    """Do the same, but not again in this process."""
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
