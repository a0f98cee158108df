"""The questions that the engine asks of each framework; the answers here are for one that needs nothing.

:class:`AfterImport` calls a function right after a framework was imported, before its user can do anything.
"""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NamedTuple

from flower_gpu.errors import ConfigError

_DIGITS = 12  # of a fraction; of a GPU with 200 GB that is less than a byte

#: Makes of the value that code sets a variable to the value that the variable gets.
Rule = Callable[[str], str]


class Cap(NamedTuple):
    """The memory of one GPU that allocators of this process may take."""

    cap_bytes: int  # without the CUDA context
    total_bytes: int  # of the whole GPU, as NVML tells it


class Setting(NamedTuple):
    """Something that code can set in this process: how to read it, and how to set it."""

    get: Callable[[], Any]
    set: Callable[[Any], object]


class Threads(NamedTuple):
    """The thread count of a framework's own pool."""

    get: Callable[[], int]
    set: Callable[[int], object]
    variables: tuple[str, ...] = ()  # which the framework puts before OMP_NUM_THREADS
    at_most_cores: bool = False  # of what its variables say; code may set more


@dataclass(frozen=True)
class Figures:
    """The memory of a framework's allocator on one GPU."""

    reserved_bytes: int  # has from the driver
    peak_reserved_bytes: int
    allocated_bytes: int  # of that in tensors
    peak_allocated_bytes: int
    free_bytes: int | None  # unused memory of the GPU; None where this process has no context on it
    total_bytes: int  # of the whole GPU, as CUDA shows it
    num_alloc_retries: int  # times that the allocator gave back what it kept, and tried again
    num_ooms: int = 0  # times that it had too little memory all the same, also where its caller went on


class Hold:
    """The cap on a framework in this process."""

    def in_force_bytes(self) -> list[int | None]:
        """Read back how much of each GPU the framework takes at most; empty where it cannot tell."""
        return []

    def release(self) -> None:
        """Take the cap away again, in a process that goes on without the lease."""


class Framework:
    """One framework. No method imports it. All but the two cap_ methods need it to be loaded."""

    name = ""  # in messages
    module = ""  # its top-level module
    last = "__name__"  # an attribute of that module that is there when the others that are used are there
    native = ""  # the top-level module of its C++ code, ...
    read_by_native: tuple[str, ...] = ()  # ... which reads these variables while it is imported
    comes_after = ""  # a library that must be imported before it, where that is installed
    imported_in_use: tuple[str, ...] = ()  # modules that it imports when it is used, which takes seconds
    read_on_gpu: tuple[str, ...] = ()  # variables that what it loads on a GPU reads while it is loaded
    set_by_modules: tuple[str, ...] = ()  # its variables that a task's module may set: they join ours

    def is_loaded(self) -> bool:
        """Tell whether this process has imported it."""
        return hasattr(sys.modules.get(self.module), self.last)

    def has_threads(self) -> bool:
        """Tell whether it has started threads here without which a fork would wait for ever."""
        return False

    def says_out_of_memory(self, error: BaseException, text: str) -> bool:
        """Tell whether an exception with this text is its own for want of GPU memory."""
        return False

    def says_no_such_device(self, text: str) -> bool:
        """Return True if this is the text of its error about a GPU number that does not exist here."""
        return False

    def cap_variables(self, fraction: str, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the variables that cap a worker to this part of each GPU; a user's smaller cap stays."""
        return {}

    def cap_rules(self, fraction: str, fixed: Container[str]) -> dict[str, Rule]:
        """Return rules for variables that code of a worker sets; without a rule, ``fixed`` ones stay."""
        return {}

    def hold(self, caps: Sequence[Cap], on_start: Callable[[], None], *, is_new: bool) -> Hold | None:
        """Hold it to caps, without starting it; ``on_start`` is called when it starts CUDA.

        ``is_new`` means that it was imported just now, with this process's environment.
        """
        return None

    def loaded_on_gpu(self) -> list[str]:
        """Return the files of libraries that it loads when a GPU is first used, in the order for that."""
        return []

    def figures(self) -> tuple[Figures, ...] | None:
        """Return its memory on each GPU; None where it has not started CUDA or cannot tell."""
        return None

    def reset_peaks(self) -> None:
        """Let the highest figures be those from now on."""

    def free_cached(self) -> None:
        """Return its allocator's cache to the driver, in a process that waits for a call."""

    def reserved_bytes(self) -> list[int] | None:
        """Return its allocator's bytes of each GPU, like :meth:`figures`; cheap, and in any thread."""
        return None

    def no_cuda(self) -> dict[str, Any] | None:
        """Return why it cannot use a GPU, with its version and the one of its CUDA; None where it can."""
        return None

    def lacks(self) -> str | None:
        """Return the names that its version lacks, each with the effect."""
        return None

    def threads(self) -> Threads | None:
        """Return its own threads."""
        return None

    def seed(self, seed: int) -> None:
        """Seed its random number generators."""

    def random_state(self) -> bytes | None:
        """Return the state of its global generator on the CPU; None where it has none that can be set."""
        return None

    def set_random_state(self, state: bytes) -> None:
        """Restore that generator from :meth:`random_state`."""

    def seed_fork(self) -> None:
        """Give a fork random numbers of its own, where all forks would draw the same."""

    def deterministic_variables(self, threads: int, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the variables that make it deterministic, with this number of threads.

        A user's own values in ``environ`` that do no harm to that stay.
        """
        return {}

    def be_deterministic(self) -> None:
        """Use only algorithms that give the same bits each time; others raise an error from now on."""

    def not_deterministic(self, text: str) -> str | None:
        """Return its operation without a deterministic algorithm that an error names, or None."""
        return None

    def on_first_step(self, then: Callable[[], object]) -> Callable[[], None] | None:
        """Have a function called at the next step of any of its optimizers.

        Returns what ends that; None if the framework cannot tell when an optimizer makes a step.
        """
        return None

    def taken_over(self) -> Iterator[Setting]:
        """Yield the settings that a worker takes over from its caller. To read them starts nothing."""
        return iter(())

    def settings(self) -> Iterator[Setting]:
        """Yield the settings that code can change in it for all later calls of this process."""
        return iter(())


def fraction_of(caps: Sequence[Cap]) -> str:
    """Return the part of a GPU that an allocator may take, never more than the cap.

    In the environment there is one number for all GPUs of a process: of several it is the smallest part.
    """
    # NVML's total is a little more than what CUDA shows, so this is on the safe side.
    return min((_down(cap.cap_bytes, cap.total_bytes) for cap in caps), default=_down(1, 1))


def smaller_fraction(ours: str, users: str | None, name: str, most: float = 1.0) -> str:
    """Return our fraction, or the user's own in the variable ``name`` if that is smaller.

    Raises ConfigError if the user's own is not a number from 0 to ``most``.
    """
    if users is None:
        return ours
    try:
        value = float(users)
    except ValueError:
        value = math.nan
    if not 0 <= value <= most:
        raise ConfigError(f"{name}: the memory fraction must be a number from 0 to 1, not {users!r}")
    return users if value < float(ours) else ours


def is_of(error: BaseException, library: str, name: str) -> bool:
    """Tell whether an exception's class, or one that it derives from, is ``name`` of a library."""
    return any(
        kind.__name__ == name and kind.__module__.partition(".")[0] == library for kind in type(error).__mro__
    )


def _down(part: int, whole: int) -> str:
    """Return ``part / whole`` as a decimal number, rounded down; at most 1."""
    units = 10**_DIGITS
    parts = min(units, max(0, part) * units // whole) if whole > 0 else 0
    return f"{parts // units}.{parts % units:0{_DIGITS}d}"


class AfterImport:
    """Calls ``then`` right after the module ``name`` was imported: a finder that finds nothing itself."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self._name = name
        self._then = then
        sys.meta_path.insert(0, self)

    def end(self) -> None:
        """Do not call it any more, if the module was not imported."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Find the module as others do, and watch its loader."""
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            sys.meta_path.insert(0, self)
            return spec
        loader, execute = spec.loader, spec.loader.exec_module

        def execute_and_call(module: ModuleType) -> None:
            vars(loader).pop("exec_module", None)  # the loader's own again
            execute(module)
            self._then()

        with suppress(AttributeError):  # a loader that takes no attributes: the environment has the cap
            loader.exec_module = execute_and_call  # type: ignore[method-assign]
        return spec
