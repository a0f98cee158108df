"""The interface of a framework. The default answers fit a framework without special needs.

:class:`AfterImport` calls a function right after the import of a framework, before its user can do anything.
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

# Digits of a fraction. On a GPU with 200 GB, the last digit is less than a byte.
_DIGITS = 12

#: Turns the value that code assigns to a variable into the value that the variable gets.
Rule = Callable[[str], str]


class Cap(NamedTuple):
    """Limit of the allocators of this process on one GPU."""

    cap_bytes: int  # without the CUDA context
    total_bytes: int  # memory of the whole GPU, from NVML


class Setting(NamedTuple):
    """A process-wide setting that code can change: how to read it, and how to set it."""

    get: Callable[[], Any]
    set: Callable[[Any], object]


class Threads(NamedTuple):
    """The thread count of a framework's own pool."""

    get: Callable[[], int]
    set: Callable[[int], object]
    variables: tuple[str, ...] = ()  # variables with precedence over OMP_NUM_THREADS
    at_most_cores: bool = False  # True if variables cannot set more threads than cores; code can


@dataclass(frozen=True)
class Figures:
    """The memory of a framework's allocator on one GPU."""

    reserved_bytes: int  # memory of the allocator
    peak_reserved_bytes: int
    allocated_bytes: int  # part of it in tensors
    peak_allocated_bytes: int
    free_bytes: int | None  # unused memory of the GPU; None if this process has no context on it
    total_bytes: int  # memory of the whole GPU, from CUDA
    num_alloc_retries: int  # number of times that the allocator returned its cache and tried again
    num_ooms: int = 0  # number of out-of-memory errors, including those that the code has handled


class Hold:
    """The cap on a framework in this process."""

    def in_force_bytes(self) -> list[int | None]:
        """Return the limit on each GPU as the framework reports it. Empty if it does not report limits."""
        return []

    def release(self) -> None:
        """Remove the cap, in a process that goes on without the lease."""


class Framework:
    """One framework. No method imports it.

    The methods about variables, error texts and threads are also called while the framework is not loaded.
    """

    name = ""  # for messages
    module = ""  # top-level module
    # An attribute of the module. When it exists, the import is far enough for all others to exist
    last = "__name__"
    native = ""  # top-level module of the C++ code
    read_by_native: tuple[str, ...] = ()  # variables read during the import of the C++ code
    comes_after = ""  # library that must be imported first, if it is installed
    imported_in_use: tuple[str, ...] = ()  # slow modules imported at the first use of the framework
    read_on_gpu: tuple[
        str, ...
    ] = ()  # variables read by libraries that are loaded with the first use of a GPU
    set_by_modules: tuple[str, ...] = ()  # variables that a task's module may set; merged with our values

    def is_loaded(self) -> bool:
        """Return True if this process has imported the framework."""
        return hasattr(sys.modules.get(self.module), self.last)

    def has_threads(self) -> bool:
        """Return True if the framework has started threads here. A fork would wait for them for ever."""
        return False

    def says_out_of_memory(self, error: BaseException, text: str) -> bool:
        """Return True if an exception with this text is the framework's own out-of-memory error for a GPU."""
        return False

    def says_no_such_device(self, text: str) -> bool:
        """Return True if this is the text of the framework's error about a GPU number that does not exist."""
        return False

    def cap_variables(self, fraction: str, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the variables that cap a worker to a fraction of each GPU, or to the user's smaller cap."""
        return {}

    def cap_rules(self, fraction: str, fixed: Container[str]) -> dict[str, Rule]:
        """Return rules for variables that code in a worker sets. Other ``fixed`` variables stay the same."""
        return {}

    def hold(self, caps: Sequence[Cap], *, is_new: bool) -> Hold | None:
        """Apply caps without starting CUDA.

        ``is_new``: True if the framework was imported in this process, with this process's environment.
        """
        return None

    def loaded_on_gpu(self) -> list[str]:
        """Return the library files that the framework loads with the first use of a GPU, in loading order."""
        return []

    def figures(self) -> tuple[Figures, ...] | None:
        """Return the allocator's figures on each GPU, or None without CUDA or such figures."""
        return None

    def reset_peaks(self) -> None:
        """Reset the peaks of the allocator."""

    def free_cached(self) -> None:
        """Return the allocator's cache to the driver, while this process waits for a call."""

    def reserved_bytes(self) -> list[int] | None:
        """Return the allocator's bytes on each GPU, like :meth:`figures`. Cheap, and safe in any thread."""
        return None

    def no_cuda(self) -> dict[str, Any] | None:
        """Return why the framework cannot use a GPU, with its version and its CUDA's, or None if it can."""
        return None

    def lacks(self) -> str | None:
        """Return the private names missing from this version, each with the effect, or None."""
        return None

    def threads(self) -> Threads | None:
        """Return the thread count of the framework's own pool, or None without one."""
        return None

    def seed(self, seed: int) -> None:
        """Seed the global random number generators."""

    def random_state(self) -> bytes | None:
        """Return the state of the global generator on the CPU, or None if it has none that can be set."""
        return None

    def set_random_state(self, state: bytes) -> None:
        """Restore a state from :meth:`random_state`."""

    def seed_fork(self) -> None:
        """Seed the global generators in a fork, if all forks would draw the same numbers otherwise."""

    def deterministic_variables(self, threads: int, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the variables that make the framework deterministic, with this number of threads.

        The user's values in ``environ`` are kept unless they prevent that.
        """
        return {}

    def be_deterministic(self) -> None:
        """Use only deterministic algorithms. Afterwards, operations without one raise an error."""

    def not_deterministic(self, text: str) -> str | None:
        """Return the operation without a deterministic algorithm that an error names, or None."""
        return None

    def on_first_step(self, then: Callable[[], object]) -> Callable[[], None] | None:
        """Call a function at the next step of any optimizer.

        Returns a function that cancels the call, or None if the framework does not report steps.
        """
        return None

    def taken_over(self) -> Iterator[Setting]:
        """Yield the settings that a worker takes over from its caller. Reading them has no side effects."""
        return iter(())

    def settings(self) -> Iterator[Setting]:
        """Yield the settings by which code can affect later calls in the same process."""
        return iter(())


def fraction_of(caps: Sequence[Cap]) -> str:
    """Return the largest fraction of a GPU within the cap.

    Environment variables have one number for all GPUs of a process, so it is the smallest fraction of all
    GPUs.
    """
    # NVML's total is a little larger than CUDA's, so the fraction is never too large.
    return min((_rounded_down(cap.cap_bytes, cap.total_bytes) for cap in caps), default=_rounded_down(1, 1))


def smaller_fraction(ours: str, users: str | None, name: str, limit: float = 1.0) -> str:
    """Return our fraction, or the user's in the variable ``name`` if it is smaller.

    Raises ConfigError if the user's fraction is not a number from 0 to ``limit``.
    """
    if users is None:
        return ours
    try:
        value = float(users)
    except ValueError:
        value = math.nan
    if not 0 <= value <= limit:
        raise ConfigError(f"{name}: the memory fraction must be a number from 0 to 1, not {users!r}")
    return users if value < float(ours) else ours


def is_of(error: BaseException, library: str, name: str) -> bool:
    """Return True if the class of an exception, or a base class, is ``name`` of a library."""
    return any(
        kind.__name__ == name and kind.__module__.partition(".")[0] == library for kind in type(error).__mro__
    )


def _rounded_down(part: int, whole: int) -> str:
    """Return ``part / whole`` as a decimal number, rounded down and limited to 1."""
    units = 10**_DIGITS
    parts = min(units, max(0, part) * units // whole) if whole > 0 else 0
    return f"{parts // units}.{parts % units:0{_DIGITS}d}"


class AfterImport:
    """Calls ``then`` right after the import of the module ``name``.

    It is a finder on ``sys.meta_path`` that lets the other finders do the work and wraps the loader.
    """

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self._name = name
        self._then = then
        sys.meta_path.insert(0, self)

    def end(self) -> None:
        """Cancel the call if the module has not been imported."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Find the module with the other finders, and wrap its loader."""
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            sys.meta_path.insert(0, self)
            return spec
        loader, execute = spec.loader, spec.loader.exec_module

        def execute_and_call(module: ModuleType) -> None:
            vars(loader).pop("exec_module", None)  # restore the loader's own method
            execute(module)
            self._then()

        # Some loaders accept no attributes. Then only the environment has the cap.
        with suppress(AttributeError):
            loader.exec_module = execute_and_call  # type: ignore[method-assign]
        return spec
