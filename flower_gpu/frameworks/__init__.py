"""PyTorch, TensorFlow (with Keras) and JAX, as far as the engine has to know them: one file for each.

Other rooms call the functions of this module. A few also name torch, because they start processes that import
it, or compare its versions::

    fork server   read_at_import, comes_before, seed_fork ───┐
    worker        environment, held_to, figures, threads ────┼──>  ALL = (PyTorch, TensorFlow, JAX)
    second try    says_out_of_memory ────────────────────────┤          │
    simulation    seed, settings (reset between calls),      │          └──> those loaded in this process
                  be_deterministic, not_deterministic ───────┘

This room imports no framework, so a task with JAX does not load PyTorch. To add a framework, subclass
:class:`~flower_gpu.frameworks.framework.Framework` in a new file and add it to :data:`ALL`. Functions for
users, such as ``get_weights``, are in the rooms ``pytorch``, ``keras`` and ``jax`` above.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, Final, TypeVar

from flower_gpu.frameworks.framework import AfterImport, Cap, Figures, Framework, Hold, Rule, fraction_of
from flower_gpu.frameworks.jax import JAX
from flower_gpu.frameworks.pytorch import NVML_CHECK, PyTorch
from flower_gpu.frameworks.tensorflow import TensorFlow

T = TypeVar("T")

ALL: Final[tuple[Framework, ...]] = (PyTorch(), TensorFlow(), JAX())

#: Variables of a process that may import frameworks but must not start CUDA.
UNTOUCHED_CUDA: Final = {NVML_CHECK: "1"}


def loaded() -> list[Framework]:
    """Return the frameworks that this process has imported."""
    return [framework for framework in ALL if framework.is_loaded()]


def with_threads() -> str | None:
    """Return the name of a framework with threads in this process, or None. A fork would hang."""
    return next((framework.name for framework in ALL if framework.has_threads()), None)


def read_at_import(modules: Collection[str]) -> set[str]:
    """Return the variables that C++ code reads itself during the import of these modules."""
    return {name for framework in ALL if framework.native in modules for name in framework.read_by_native}


def comes_before(module: str) -> str:
    """Return the library that must be imported before a module, or an empty text."""
    return next((framework.comes_after for framework in ALL if framework.module == module), "")


def imported_in_use(module: str) -> tuple[str, ...]:
    """Return the modules that a framework imports at its first use, which takes seconds."""
    return next((framework.imported_in_use for framework in ALL if framework.module == module), ())


def loaded_on_gpu() -> list[str]:
    """Return the library files that loaded frameworks open when a process first uses a GPU."""
    return [file for framework in loaded() for file in framework.loaded_on_gpu()]


def read_on_gpu() -> set[str]:
    """Return the variables that these libraries read while they are loaded, bypassing ``os.environ``."""
    return {name for framework in loaded() for name in framework.read_on_gpu}


def set_by_modules() -> set[str]:
    """Return the variables that the module of a task may set. Frameworks merge them with our values."""
    return {name for framework in ALL for name in framework.set_by_modules}


def seed_fork() -> None:
    """Seed the global generators of numpy and the frameworks, so that each fork draws other numbers."""
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    for framework in loaded():
        framework.seed_fork()


def use_one_thread() -> None:
    """Let frameworks compute in one thread in this process, because forks would hang otherwise."""
    for framework in loaded():
        if (threads := framework.threads()) is not None:
            threads.set(1)


def environment(caps: Sequence[Cap], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that cap the frameworks of a worker.

    The user's settings of allocators in ``environ`` are kept, including a smaller cap.

    Raises ConfigError if the user's cap is not a number.
    """
    fraction = fraction_of(caps)
    return {
        name: value for framework in ALL for name, value in framework.cap_variables(fraction, environ).items()
    }


def rules(caps: Sequence[Cap], fixed: Container[str]) -> dict[str, Rule]:
    """Return rules for variables that code in the worker sets. Other ``fixed`` variables stay the same."""
    fraction = fraction_of(caps)
    return {name: rule for framework in ALL for name, rule in framework.cap_rules(fraction, fixed).items()}


@contextmanager
def held_to(caps: Sequence[Cap]) -> Iterator[list[Hold]]:
    """Cap each framework within the block, as soon as it is imported.

    Yields a list to which the holds of the frameworks are added.
    """
    holds: list[Hold] = []

    def add_hold(framework: Framework, is_new: bool) -> None:
        if (hold := framework.hold(caps, is_new=is_new)) is not None:
            holds.append(hold)

    try:
        with each_loaded(add_hold):
            yield holds
    finally:
        for hold in holds:
            with suppress(Exception):  # must not hide the error of the task
                hold.release()


@contextmanager
def each_loaded(then: Callable[[Framework, bool], None]) -> Iterator[None]:
    """Call a function with each framework: at once if it is loaded, otherwise when the block imports it.

    ``then``: called with the framework, and with True if it was imported within the block.
    """
    finders = []
    try:
        for framework in ALL:
            if framework.is_loaded():
                then(framework, False)
            else:
                finders.append(AfterImport(framework.module, partial(then, framework, True)))
        yield
    finally:
        for finder in finders:
            finder.end()


@contextmanager
def at_first_step(then: Callable[[], object]) -> Iterator[None]:
    """Call a function at the first step of an optimizer in the block, if a framework reports steps."""
    with ExitStack() as hooks:

        def watch(framework: Framework, _: bool) -> None:
            if (end := framework.on_first_step(then)) is not None:
                hooks.callback(end)

        with each_loaded(watch):
            yield


def deterministic_variables(threads: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that make all frameworks deterministic."""
    return {
        name: value
        for framework in ALL
        for name, value in framework.deterministic_variables(threads, environ).items()
    }


def not_deterministic(text: str) -> str | None:
    """Return the operation without a deterministic algorithm that an error names, or None."""
    return _first(framework.not_deterministic(text) for framework in ALL)


def reserved_bytes() -> list[int] | None:
    """Return a framework's reserved bytes on each GPU, or None without CUDA or such figures."""
    return _first(framework.reserved_bytes() for framework in loaded())


def figures() -> tuple[Figures, ...] | None:
    """Return the figures of a framework's allocator for each GPU, or None without CUDA or such figures."""
    return _first(framework.figures() for framework in loaded())


def _first(answers: Iterable[T | None]) -> T | None:
    return next((answer for answer in answers if answer is not None), None)


def reset_peaks() -> None:
    """Reset the peaks of all allocators, at the start of another call in this process."""
    for framework in loaded():
        framework.reset_peaks()


def free_cached() -> None:
    """Return the caches of all allocators to the driver, while this process waits for a call."""
    for framework in loaded():
        framework.free_cached()


def no_cuda() -> dict[str, Any] | None:
    """Return why a loaded framework cannot use a GPU, or None if all can."""
    return _first(framework.no_cuda() for framework in loaded())


def says_no_such_device(text: str) -> bool:
    """Return True if this is the text of a loaded framework about a GPU number that does not exist."""
    return any(framework.says_no_such_device(text) for framework in loaded())


def lacks() -> str | None:
    """Return the names missing from the version of a loaded framework, each with the effect, or None."""
    return _first(framework.lacks() for framework in loaded())
