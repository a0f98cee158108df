"""Importing libraries into a fork server, under watch: a fork must be able to do what a fresh process can."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.machinery import (
    ExtensionFileLoader,
    ModuleSpec,
    SourceFileLoader,
    SourcelessFileLoader,
)
from types import ModuleType
from typing import Any

from flower_gpu import frameworks
from flower_gpu.errors import ConfigError
from flower_gpu.workers.call import Preload, run_preload
from flower_gpu.workers.native import initialized_cuda_devices

#: Imported by every fork server, as far as they are installed.
ALWAYS = ("numpy", "numpy.random", "torch", "cloudpickle")

# Libraries that start threads when they are imported, and whose forks were seen to work all the same: workers
# that found pyarrow imported build and read data sets of flwr-datasets (benchmarks/isolation/client_task.py).
_THREADS_SURVIVE_FORKS = {"pyarrow"}


class UnfitLibraryError(Exception):
    """Importing a library did something that a fork could not undo.

    ``libraries``: top-level names of all that were being imported when it happened.
    ``is_cuda``: whether it initialised CUDA; else it started a thread.
    """

    def __init__(self, libraries: list[str], is_cuda: bool) -> None:
        what = "initialises CUDA" if is_cuda else "starts a thread"
        super().__init__(f"{', '.join(libraries)}: importing it {what}")
        self.libraries = libraries
        self.is_cuda = is_cuda


def cuda_is_touched() -> bool:
    """Tell whether this process has started CUDA, or tried to; then forks of it cannot use a GPU."""
    if initialized_cuda_devices() is not None:
        return True
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the one that listed the folder
            # Not /dev/nvidiactl and those of the GPUs: NVML opens them, too, and leaves CUDA alone.
            if os.readlink(f"/proc/self/fd/{descriptor}").startswith("/dev/nvidia-uvm"):
                return True
    return False


def cuda_message(name: str) -> str:
    """Return what to tell a user whose function or module has started CUDA where others are forked from."""
    return (
        f"{name} initialised CUDA, so that no worker could use a GPU: keep the data on the CPU, and choose "
        "the device in the task. Only torch.cuda.is_available() and device_count() may be asked there"
    )


def import_all(names: Iterable[str]) -> None:
    """Import modules one after the other; those that cannot be imported (any more) are left out.

    Raises UnfitLibraryError if one of them initialised CUDA, or started a thread.
    """
    with _watched():
        for name in names:
            with suppress(ImportError, AttributeError):
                import_module(name)


def import_always(without: Iterable[str]) -> None:
    """Import what nearly every worker needs, as far as it is installed.

    Raises UnfitLibraryError if one of them initialised CUDA, or started a thread.
    """
    excluded = set(without)
    import_all(name for name in ALWAYS if name.partition(".")[0] not in excluded)


def preload_on_cpu(functions: Preload) -> None:
    """Call functions of the user's that load data.

    Raises ConfigError if one of them initialised CUDA, or started the threads of TensorFlow or JAX.
    Raises Exception: what a function raised.
    """
    for name, kwargs in functions:
        run_preload([(name, kwargs)])
        if cuda_is_touched():
            raise ConfigError(cuda_message(name))
        if (library := frameworks.with_threads()) is not None:
            raise ConfigError(
                f"{name} computes with {library}, whose threads no worker would have: it would wait for them "
                "for ever. Load numpy arrays there, and make tensors, data sets and models in the task"
            )


class _Watch:
    """A finder in front of all others that looks what each module's execution does to the process."""

    def __init__(self) -> None:
        self._running: list[str] = []
        self._threads = _thread_count()
        self._unfit: UnfitLibraryError | None = None

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if library := frameworks.comes_before(name):
            with suppress(ImportError):
                import_module(library)
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                if isinstance(spec.loader, SourceFileLoader | SourcelessFileLoader | ExtensionFileLoader):
                    self._wrap(spec)
                return spec
        return None

    def check(self) -> None:
        """Raise if a thread or CUDA was started; also once more after a library caught the error."""
        threads = _thread_count()
        grown, self._threads = threads > self._threads, threads
        innermost = self._running[-1] if self._running else ""
        if grown and innermost not in _THREADS_SURVIVE_FORKS:
            self._unfit = UnfitLibraryError(self._names(), is_cuda=False)
        elif cuda_is_touched():
            self._unfit = UnfitLibraryError(self._names(), is_cuda=True)
        if self._unfit is not None:
            raise self._unfit

    def _names(self) -> list[str]:
        return list(dict.fromkeys(self._running))

    def _wrap(self, spec: ModuleSpec) -> None:
        loader: Any = spec.loader
        execute = loader.exec_module
        library = spec.name.partition(".")[0]

        def exec_module(module: ModuleType) -> None:
            vars(loader).pop("exec_module", None)  # another finder may have wrapped it as well
            self._running.append(library)
            try:
                execute(module)
                self.check()
            finally:
                self._running.pop()

        loader.exec_module = exec_module


def _thread_count() -> int:
    return len(os.listdir("/proc/self/task"))


@contextmanager
def _watched() -> Iterator[None]:
    watch = _Watch()
    sys.meta_path.insert(0, watch)
    try:
        yield
        watch.check()
    finally:
        sys.meta_path.remove(watch)
