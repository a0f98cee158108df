"""What the engine must know of PyTorch, TensorFlow (with Keras) and JAX: one file for each.

Other rooms ask here; only the fork server names torch, which it imports in any case::

    fork server   read_at_import, comes_before, seed_fork ───┐
    worker        environment, held_to, figures, threads ────┼──>  ALL = (PyTorch, TensorFlow, JAX)
    second try    says_out_of_memory ────────────────────────┤          │
    simulation    seed, settings (set back between calls),   │          └──> those loaded in this process
                  be_deterministic, not_deterministic ───────┘

Nothing here imports a framework: a task that uses JAX need not load PyTorch. To add one, answer the questions
of :class:`~flower_gpu.frameworks.framework.Framework` in a file here, and add it to :data:`ALL`. What users
call, such as ``get_weights``, is in the rooms ``pytorch``, ``keras`` and ``jax`` above.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, Final

from flower_gpu.frameworks.framework import AfterImport, Cap, Figures, Framework, Hold, Rule, fraction_of
from flower_gpu.frameworks.jax import JAX
from flower_gpu.frameworks.pytorch import NVML_CHECK, PyTorch
from flower_gpu.frameworks.tensorflow import TensorFlow

ALL: Final[tuple[Framework, ...]] = (PyTorch(), TensorFlow(), JAX())

#: Variables of a process that may import frameworks, but is not to start CUDA.
UNTOUCHED_CUDA: Final = {NVML_CHECK: "1"}


def loaded() -> list[Framework]:
    """Return the frameworks that this process has imported."""
    return [framework for framework in ALL if framework.is_loaded()]


def with_threads() -> str | None:
    """Name the framework whose threads this process has started: a fork would wait for them for ever."""
    return next((framework.name for framework in ALL if framework.has_threads()), None)


def read_at_import(modules: Collection[str]) -> set[str]:
    """Return the variables that C++ code reads while these modules are imported, unseen by ``os.environ``."""
    return {name for framework in ALL if framework.native in modules for name in framework.read_by_native}


def comes_before(module: str) -> str:
    """Return the library that must be imported before a module; empty where there is none."""
    return next((framework.comes_after for framework in ALL if framework.module == module), "")


def imported_in_use(module: str) -> tuple[str, ...]:
    """Return the modules that a framework imports at its first use, which takes seconds in each worker."""
    return next((framework.imported_in_use for framework in ALL if framework.module == module), ())


def loaded_on_gpu() -> list[str]:
    """Return the files of libraries that frameworks load when a GPU is first used: in each process anew."""
    return [file for framework in loaded() for file in framework.loaded_on_gpu()]


def read_on_gpu() -> set[str]:
    """Return the variables that these libraries read while they are loaded, unseen by ``os.environ``."""
    return {name for framework in loaded() for name in framework.read_on_gpu}


def set_by_modules() -> set[str]:
    """Return the variables of a worker that the task's module may set: frameworks join them with ours."""
    return {name for framework in ALL for name in framework.set_by_modules}


def seed_fork() -> None:
    """Give a fork random numbers of its own: numpy's and those of frameworks would be the same in each."""
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    for framework in loaded():
        framework.seed_fork()


def use_one_thread() -> None:
    """Have frameworks compute in one thread here: with more of them, forks of this process would hang."""
    for framework in loaded():
        if (own := framework.threads()) is not None:
            own.set(1)


def environment(caps: Sequence[Cap], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that hold a worker's frameworks to their caps.

    The user's settings of allocators in ``environ`` stay, a smaller cap too.

    Raises ConfigError if a user's own cap is no number.
    """
    fraction = fraction_of(caps)
    return {
        name: value for framework in ALL for name, value in framework.cap_variables(fraction, environ).items()
    }


def rules(caps: Sequence[Cap], fixed: Container[str]) -> dict[str, Rule]:
    """Return rules for variables that code of the worker sets; other ``fixed`` variables stay."""
    fraction = fraction_of(caps)
    return {name: rule for framework in ALL for name, rule in framework.cap_rules(fraction, fixed).items()}


@contextmanager
def held_to(caps: Sequence[Cap], on_start: Callable[[], None]) -> Iterator[list[Hold]]:
    """Hold each framework to caps in the block, as soon as it is imported.

    ``on_start`` is called when one starts CUDA and can tell. The list has what holds a framework by then.
    """
    holds: list[Hold] = []

    def hold(framework: Framework, is_new: bool) -> None:
        if (found := framework.hold(caps, on_start, is_new=is_new)) is not None:
            holds.append(found)

    try:
        with each_loaded(hold):
            yield holds
    finally:
        for each in holds:
            with suppress(Exception):  # it must not take the place of the task's own error
                each.release()


@contextmanager
def each_loaded(then: Callable[[Framework, bool], None]) -> Iterator[None]:
    """Call a function with each framework: now, or in the block as soon as it is imported.

    Its second argument tells whether the framework was imported just now.
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
    """Call a function at the first step of an optimizer in the block, if a framework tells of steps."""
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
    return next((found for each in ALL if (found := each.not_deterministic(text)) is not None), None)


def reserved_bytes() -> list[int] | None:
    """Return a framework's reserved bytes of each GPU; None without CUDA, or without such figures."""
    return next((found for each in loaded() if (found := each.reserved_bytes()) is not None), None)


def figures() -> tuple[Figures, ...] | None:
    """Return the figures of a framework's allocator, one of each GPU; None like :func:`reserved_bytes`."""
    return next((found for each in loaded() if (found := each.figures()) is not None), None)


def reset_peaks() -> None:
    """Let the highest figures of allocators be those from now on: a process may do several calls."""
    for framework in loaded():
        framework.reset_peaks()


def free_cached() -> None:
    """Return the caches of all allocators to the driver: this process waits for a call."""
    for framework in loaded():
        framework.free_cached()


def no_cuda() -> dict[str, Any] | None:
    """Return why a framework that is loaded cannot use a GPU; None where none says so."""
    return next((found for each in loaded() if (found := each.no_cuda()) is not None), None)


def says_no_such_device(text: str) -> bool:
    """Return True if this is the text of a loaded framework about a GPU number that does not exist."""
    return any(each.says_no_such_device(text) for each in loaded())


def lacks() -> str | None:
    """Return the names that a loaded framework lacks in its version, each with the effect."""
    return next((found for each in loaded() if (found := each.lacks()) is not None), None)
