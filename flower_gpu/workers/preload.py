"""Functions of the user's that run once where workers are forked from, so that all find what they load."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from flower_gpu.errors import ConfigError
from flower_gpu.workers.call import check_task, load_task
from flower_gpu.workers.native import initialized_cuda_devices

#: Functions with their keyword arguments, in a form that can travel.
Preload = Sequence[tuple[str, Mapping[str, Any]]]

# What this very process has loaded, for calls that run in it.
_done: set[str] = set()

#: What of it was the first to initialise CUDA in this process; empty where nothing did.
started_cuda = ""


def checked(preload: Any) -> tuple[tuple[str, dict[str, Any]], ...]:
    """Bring what a user may write into one form.

    ``preload``: ``"package.module:function"``, or with its keyword arguments, or ``"package.module"``.
    Raises ConfigError if it is something else.
    """
    if preload is None:
        return ()
    if isinstance(preload, str) or _is_pair(preload):
        preload = [preload]
    return tuple(_entry(entry) for entry in preload)


def check_modules(preload: Preload, path: Sequence[str]) -> None:
    """Look for the modules, and run none of their code.

    ``path``: what comes before ``sys.path`` where they will be imported.
    Raises ConfigError if one is nowhere to be found.
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


def run(preload: Preload) -> None:
    """Import the modules and call the functions."""
    global started_cuda
    for name, kwargs in preload:
        if ":" in name:
            load_task(name)(**kwargs)
        else:
            import_module(name)
        if not started_cuda and initialized_cuda_devices() is not None:
            started_cuda = name


def run_once(preload: Preload) -> None:
    """Do the same, but not again in this process."""
    for name, kwargs in preload:
        key = json.dumps([name, kwargs])
        if key not in _done:
            run([(name, kwargs)])
            _done.add(key)


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
