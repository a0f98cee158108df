"""Environment variables of processes with leases: fixed ones, and the visible GPUs under Ray."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

from flower_gpu import standard_streams
from flower_gpu.frameworks.framework import Rule
from flower_gpu.gpu import drivers

_RAYLET = "RAY_RAYLET_PID"  # variable that Ray sets in each of its worker processes


def without_ray(environ: MutableMapping[str, str]) -> MutableMapping[str, str]:
    """Return the environment with the visible GPUs that Ray itself was started with.

    Ray hides all GPUs from an actor that requested none, and shows other actors only some. Both are guesses
    about the use of GPUs, but leases know it. The environment is unchanged outside of Ray's actors, and if
    Ray's own environment cannot be read.
    """
    raylet = environ.get(_RAYLET, "")
    if not raylet.isdecimal() or int(raylet) != os.getppid():
        return environ
    try:
        with open(f"/proc/{raylet}/environ", "rb") as file:
            text = file.read()
    except OSError:
        return environ
    variables = dict(line.split("=", 1) for line in os.fsdecode(text).split("\0") if "=" in line)
    # Without the variable of Ray, workers of this process do not repeat the query.
    visible = drivers.of_host().visible_variable
    others = {name: value for name, value in environ.items() if name not in (visible, _RAYLET)}
    return others | {name: value for name, value in variables.items() if name == visible}


def kept(variables: Iterable[str]) -> dict[str, Rule]:
    """Return rules that keep these variables at their present values, as far as they are set."""
    return {name: partial(_value, os.environ[name]) for name in variables if name in os.environ}


def _value(value: str, _: str) -> str:
    return value


@contextmanager
def fixed(rules: Mapping[str, Rule]) -> Iterator[None]:
    """Apply these rules to assignments to variables of ``os.environ`` in the block.

    The variables cannot be deleted either. ``clear`` keeps them, and ends. Assignments by a library in C are
    not noticed.
    """
    kind: Any = type(os.environ)
    module: Any = os
    outer, putenv, unsetenv = dict(_rules), os.putenv, os.unsetenv
    _rules.update(rules)
    module.putenv = lambda name, value: putenv(name, _ruled(name, value))
    module.unsetenv = lambda name: None if _is_fixed(name) else unsetenv(name)
    # The mappings cannot be replaced by others, because other modules have imported them.
    mappings: tuple[Any, ...] = os.environ, os.environb
    for mapping in mappings:
        mapping.__class__ = _FixedVariables
    try:
        yield
    finally:
        for mapping in mappings:
            mapping.__class__ = kind
        module.putenv, module.unsetenv = putenv, unsetenv
        _rules.clear()
        _rules.update(outer)
        _said.clear()


_rules: Final[dict[str, Rule]] = {}  # rules of the variables that are fixed at this moment
_said: Final[set[str]] = set()  # names of fixed variables with a refused change
_Variables: Any = type(os.environ)


class _FixedVariables(_Variables):  # type: ignore[misc]
    """The class of ``os.environ`` while some variables are fixed."""

    def __setitem__(self, name: Any, value: Any) -> None:
        super().__setitem__(name, _ruled(name, value))

    def __delitem__(self, name: Any) -> None:
        if name not in self or not _is_fixed(name):
            super().__delitem__(name)

    def popitem(self) -> tuple[Any, Any]:
        # clear() calls this until it raises KeyError.
        for name in self:
            if not _is_fixed(name):
                return name, self.pop(name)
        raise KeyError("what is left holds this worker to its lease")


def _is_fixed(name: Any) -> bool:
    return isinstance(name, str | bytes) and os.fsdecode(name) in _rules


def _ruled(name: Any, value: Any) -> Any:
    """Return the value that a variable gets, of the same type as ``value``.

    The first refused change of a variable is printed.
    """
    if not _is_fixed(name) or not isinstance(value, str | bytes):
        return value
    name, asked = os.fsdecode(name), os.fsdecode(value)
    used = _rules[name](asked)
    if asked not in used and name not in _said:
        _said.add(name)
        has = os.environ.get(name, "")
        standard_streams.tell(
            f"flower-gpu: {name}={asked} is ignored: this worker is limited to its lease, which has {has!r}"
        )
    return used if isinstance(value, str) else os.fsencode(used)
