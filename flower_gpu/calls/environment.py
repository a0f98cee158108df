"""The environment variables of one worker: its visible GPUs, and the limits of its allocators."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any, Final

from flower_gpu import frameworks, standard_streams
from flower_gpu.frameworks.framework import Cap, Rule
from flower_gpu.gpu import guard, mps
from flower_gpu.leases.lease import VARIABLE, Lease

_RAYLET = "RAY_RAYLET_PID"  # variable that Ray sets in each of its worker processes
_VISIBLE = "CUDA_VISIBLE_DEVICES"


def of_worker(lease: Lease | None, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a worker with this lease. Without a lease, the worker sees no GPU.

    They are set on top of ``environ``. The user's own allocator settings in it still apply, and so does a
    smaller cap.

    Raises ConfigError if the user's own cap is no number.
    """
    if lease is None:
        return {_VISIBLE: "", VARIABLE: "", **guard.environment(())}
    return {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        _VISIBLE: ",".join(share.uuid for share in lease.shares),
        VARIABLE: lease.to_text(),
        **guard.environment(share.device_files for share in lease.shares),
        **mps.limits(lease.processors, max(share.memory_bytes for share in lease.shares), environ),
        **frameworks.environment(caps_of(lease), environ),
    }


def caps_of(lease: Lease) -> list[Cap]:
    """Return the limit of allocators on each GPU of a lease.

    If the driver caps the worker, CUDA shows the cap as the total memory of the GPU.
    """
    return [
        Cap(share.cap_bytes, share.memory_bytes if lease.by_driver else share.total_bytes)
        for share in lease.shares
    ]


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
    others = {name: value for name, value in environ.items() if name not in (_VISIBLE, _RAYLET)}
    return others | {name: value for name, value in variables.items() if name == _VISIBLE}


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
