"""The libraries of a process that forks workers: how they are imported, checked and learned.

A fork must be able to do everything that a fresh process can. But CUDA does not work in a fork of a process
that has initialised it, and a fork has only one thread. So each import is watched, and a library that
initialises CUDA or starts a thread is refused (:class:`UnfitLibraryError`). The process that imported it must
end, because the import cannot be undone.

:class:`Learning` collects the modules that workers had to import. :class:`Growth` is the trial that imports
them, a fork of the server. :mod:`.server` explains how a trial takes the server's place.
"""

from __future__ import annotations

import ctypes
import gc
import json
import logging
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.machinery import (
    ExtensionFileLoader,
    ModuleSpec,
    PathFinder,
    SourceFileLoader,
    SourcelessFileLoader,
)
from itertools import islice
from pathlib import Path
from typing import Any, Final

from flower_gpu import files, frameworks
from flower_gpu.errors import ConfigError
from flower_gpu.frameworks.cuda_answers import initialized_cuda_devices
from flower_gpu.workers import thread_owners
from flower_gpu.workers.call import Preload, run_preload
from flower_gpu.workers.forkserver import identity, sockets
from flower_gpu.workers.forkserver.fitness import EnvironmentUse
from flower_gpu.workers.own_process import facts

#: Modules that every fork server imports if they are installed.
ALWAYS = ("numpy", "numpy.random", "torch", "cloudpickle")

# Libraries that start threads at import, but were seen to work in forks. Workers forked with pyarrow build
# and read data sets of flwr-datasets (benchmarks/isolation/client_task.py).
_THREADS_SURVIVE_FORKS = {"pyarrow"}


# Stands for the libraries of load_for_gpus() in a list of modules, so that a trial loads them. Loading them
# from a slow disk takes minutes, and ctypes holds the GIL meanwhile. A server that loaded them itself would
# look as if it hung.
_FOR_GPUS: Final = "libraries for GPUs (cuDNN)"

_PACKAGE = __name__.partition(".")[0]


class UnfitLibraryError(BaseException):
    """Importing a library did something that a fork could not undo.

    The base class is not ``Exception``, because a library that catches exceptions would go on with incomplete
    data, and may save it. For example, matplotlib wrote a list of fonts into the user's cache, and one font
    was missing.

    ``libraries``: top-level names of all libraries that were being imported at that moment.
    """

    def __init__(self, libraries: list[str], what: str) -> None:
        super().__init__(f"{', '.join(libraries)}: importing it {what}")
        self.libraries = libraries


def cuda_is_touched() -> bool:
    """Return True if this process has initialised CUDA, or tried to. Its forks then cannot use a GPU."""
    if initialized_cuda_devices() is not None:
        return True
    for descriptor in os.listdir("/proc/self/fd"):
        # The descriptor that listed the folder is closed by now.
        with suppress(OSError):
            # /dev/nvidiactl and the files of the GPUs do not count: NVML also opens them, without CUDA.
            if os.readlink(f"/proc/self/fd/{descriptor}").startswith("/dev/nvidia-uvm"):
                return True
    return False


def import_all(names: Iterable[str]) -> None:
    """Import modules in order, and skip modules that cannot be imported.

    The garbage collector is off meanwhile, because imports make little garbage, and collecting it takes long.
    Changes of the root logger are undone, because all workers would inherit them. For example, opacus adds a
    handler, and each line that a worker logs would appear twice.

    Raises UnfitLibraryError if an import did something that a fork could not undo.
    """
    watch, root, was_enabled = _ImportWatch(), logging.root, gc.isenabled()
    handlers, level = root.handlers[:], root.level
    gc.disable()
    sys.meta_path.insert(0, watch)
    try:
        for name in names:
            if name not in sys.modules:
                with watch.importing(name.partition(".")[0]), suppress(ImportError, AttributeError):
                    import_module(name)
        watch.check()
    finally:
        sys.meta_path.remove(watch)
        if was_enabled:
            gc.enable()
        root.handlers[:] = handlers
        root.setLevel(level)


def import_own(function: str | None) -> None:
    """Import the module of a function (``"package.module:function"``) if it belongs to this package."""
    if function is not None and _is_ours(function):
        import_module(function.partition(":")[0])


def load_for_gpus() -> set[str]:
    """Load the libraries that the first use of a GPU needs, for all forks of this process.

    Returns the environment variables that were read. A library that cannot be loaded is skipped. A worker
    then tries to load it, and reports the reason.
    """
    for file in frameworks.loaded_on_gpu():
        with suppress(OSError):
            ctypes.CDLL(file)
    return frameworks.read_on_gpu()


@cache
def _has_libraries_for_gpus() -> bool:
    return bool(frameworks.loaded_on_gpu())


def preload_on_cpu(functions: Preload) -> None:
    """Call the user's functions that load data.

    Raises ConfigError if a function initialised CUDA, or started threads that a fork would miss.
    Raises the exceptions of the functions.
    """
    threads_before = thread_owners.native_ids()
    for name, kwargs in functions:
        run_preload([(name, kwargs)])
        if cuda_is_touched():
            raise ConfigError(
                f"{name} initialised CUDA, so that no worker could use a GPU: keep the data on the CPU, and "
                "choose the device in the task. Only torch.cuda.is_available() and device_count() may be "
                "called there"
            )
        if (library := frameworks.with_threads()) is not None:
            raise ConfigError(
                f"{name} computes with {library} in the process that workers are forked from. A fork has no "
                f"threads of {library}, and would wait for them forever. Load numpy arrays there, and make "
                "tensors, data sets and models in the task"
            )
        if missed := thread_owners.missed_in_fork(threads_before):
            raise ConfigError(
                f"{name} starts threads in the process that workers are forked from ({', '.join(missed)}). A "
                "fork has none of them, and would wait for them forever. Load the data without threads, or "
                "in the task"
            )
    # Otherwise, each fork would inherit the garbage that loading has left.
    gc.collect()


class _ImportWatch:
    """A finder in front of all others that checks the process after each library's import.

    Checking after each module would add a fifth to the time of the imports. So the process is checked only
    when a library has been imported, or begins to import another library.

    An extension module runs code twice: when it is created and when it is executed. The threads of polars
    start when its extension is created, so both steps are watched.
    """

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
                library = spec.name.partition(".")[0]
                if isinstance(spec.loader, ExtensionFileLoader):
                    self._watch(spec.loader, "create_module", library)
                if isinstance(spec.loader, SourceFileLoader | SourcelessFileLoader | ExtensionFileLoader):
                    self._watch(spec.loader, "exec_module", library)
                return spec
        return None

    @contextmanager
    def importing(self, library: str) -> Iterator[None]:
        """Hold ``library`` responsible for what happens in the block."""
        is_another = not self._running or self._running[-1] != library
        if is_another:
            # Until here, the library that imports this one was responsible.
            self.check()
        self._running.append(library)
        try:
            yield
            if is_another:
                self.check()
        finally:
            self._running.pop()

    def check(self) -> None:
        """Raise UnfitLibraryError if an import started a thread or initialised CUDA.

        The error is raised again by each later check, because a library may have caught the first one.
        """
        threads = _thread_count()
        grown, self._threads = threads > self._threads, threads
        innermost = self._running[-1] if self._running else ""
        if grown and innermost not in _THREADS_SURVIVE_FORKS:
            self._unfit = UnfitLibraryError(self._names(), "starts a thread")
        elif cuda_is_touched():
            self._unfit = UnfitLibraryError(self._names(), "initialises CUDA")
        if self._unfit is not None:
            raise self._unfit

    def _names(self) -> list[str]:
        return list(dict.fromkeys(self._running))

    def _watch(self, loader: Any, step: str, library: str) -> None:
        do = getattr(loader, step)

        def watched(argument: Any) -> Any:
            # Another finder may have wrapped the loader as well, and removed this function already.
            vars(loader).pop(step, None)
            with self.importing(library):
                return do(argument)

        setattr(loader, step, watched)


def _thread_count() -> int:
    return len(os.listdir("/proc/self/task"))


@dataclass(frozen=True)
class Growth:
    """A trial: a fork of the server that imports libraries, and then takes the server's place."""

    pid: int
    report: int  # read end of the pipe on which the trial reports the outcome
    names: list[str]  # modules that it imports
    deadline: float  # time limit on the clock of ``time.monotonic``
    #: Callers and kinds of calls that no longer wait for the trial, because they have waited too long.
    without: set[int | str] = field(default_factory=set)
    #: Modules that workers have reported since the trial was forked, by the kind of call. The trial does not
    #: know of them. The inner dict is an ordered set.
    reported: dict[str, dict[str, None]] = field(default_factory=dict)

    def libraries(self) -> list[str]:
        """Return the top-level names of the modules that the trial imports."""
        return list(dict.fromkeys(name.partition(".")[0] for name in self.names))

    def note_later(self, names: Sequence[str], kind: str) -> None:
        """Record the modules of a worker's report that this trial does not import."""
        known = set(self.names)
        if later := [name for name in names if name not in known]:
            self.reported.setdefault(kind, {}).update(dict.fromkeys(later))

    def refused(self) -> set[str] | None:
        """Return the libraries to refuse, or None if the trial has taken its parent's place.

        Blocks until the trial has reported, or has died. At least one of the trial's libraries is refused.
        Otherwise, the next trial would import the same libraries, and so on for ever. If the trial blames
        none of its libraries, or died, all of them are refused.
        """
        data = os.read(self.report, 1 << 16)
        os.close(self.report)
        blamed = json.loads(data) if data else []
        if blamed is None:
            return None
        asked = set(self.libraries())
        return {*blamed} if asked & {*blamed} else {*blamed, *asked}


def learned_file(name: str) -> Path:
    """Return the path of the file with the learned libraries, for the next server of this name."""
    return sockets.folder() / f"{name}.libraries"


def imported_since(count: int, folders: Sequence[str]) -> list[str]:
    """Return the modules of installed packages in order of import, without the first ``count`` modules.

    ``folders``: folders with installed packages.
    """
    prefixes = tuple(os.path.join(folder, "") for folder in folders)
    # Look only at the last modules: in a fork, looking at an object copies its page.
    last = list(islice(reversed(sys.modules), max(0, len(sys.modules) - count)))
    present = []
    for name in reversed(last):
        spec = getattr(sys.modules[name], "__spec__", None)
        origin = getattr(spec, "origin", None)
        # Skip objects that libraries put into sys.modules by hand: their names differ, or they have no file.
        if spec is None or spec.name != name or not isinstance(origin, str):
            continue
        if _is_ours(name) or origin.startswith(prefixes):
            present.append(name)
    return present


def is_installed(name: str, folders: Sequence[str]) -> bool:
    """Return True if a module belongs to an installed package. Imports nothing."""
    with suppress(ValueError, ImportError):
        return _is_ours(name) or PathFinder.find_spec(name.partition(".")[0], folders) is not None
    return False


def _is_ours(name: str) -> bool:
    """Return True if a module belongs to this package.

    Its modules may be imported even from an editable install, which is in no folder of installed packages. An
    edit of this package leads to another server name, so a server never has outdated modules of it.
    """
    return name.partition(".")[0] == _PACKAGE


class Learning:
    """The modules that the server ``name`` has imported, and the modules that its workers had to import.

    ``use``: records which environment variables the libraries use.
    ``without``: top-level names of libraries that the server must not import.
    ``running``: the trial that is importing libraries now, or None.
    ``refused``: top-level names of libraries that a trial could not import without harm.
    """

    def __init__(self, name: str, use: EnvironmentUse, without: Sequence[str]) -> None:
        self.running: Growth | None = None
        self.refused: set[str] = set()
        self._without = without
        self._use = use
        self._file = learned_file(name)
        self._folders = identity.installed_folders(sys.path)
        self._learned: list[str] = []
        self._tried: set[str] = set()
        self._reported: list[str] = []
        self._reporters: set[int | str] = set()

    def libraries(self) -> list[str]:
        """Return the top-level names of the learned libraries."""
        return sorted({name.partition(".")[0] for name in self._learned})

    def begin(self) -> None:
        """Import the libraries of every server, and the libraries that an earlier server has learned.

        Raises an exception if that fails. The file with the learned libraries is removed before they are
        imported. So the next server starts without them, even if this process dies here.
        """
        names: list[str] = []
        with self._use.noted():
            import_all(name for name in ALWAYS if name.partition(".")[0] not in self._without)
            with suppress(OSError, ValueError):
                names = [name for name in json.loads(self._file.read_text()) if isinstance(name, str)]
                self._file.unlink()
            import_all(names)
        self._take_over(names)

    def imported(self, count: int) -> list[str]:
        """Return the modules that this worker and its forks have imported, without the first ``count``."""
        modules = imported_since(count, self._folders)
        return list(dict.fromkeys([*modules, *(facts.imported_by_forks or ())]))

    def installed(self, names: Sequence[str]) -> list[str]:
        """Return the names in ``names`` of modules of installed packages.

        Other modules are left out, because their files may change while the server runs.
        """
        return [name for name in names if is_installed(name, self._folders)]

    def ask_for_gpus(self, *requester: int | str) -> None:
        """Record that workers will use a GPU, so that the libraries for it are loaded once.

        ``requester``: as in :meth:`note`.
        """
        if _FOR_GPUS not in self._tried and _has_libraries_for_gpus():
            self.note([_FOR_GPUS], *requester)

    def note(self, names: Sequence[str], *requester: int | str) -> None:
        """Record the modules that a worker imported. ``requester``: its caller, and the kind of call."""
        self._reported = list(dict.fromkeys([*self._reported, *names]))
        self._reporters.update(requester)

    def wanted(self) -> list[str]:
        """Return the modules to import, in the order of the reports. Each module is tried once."""
        avoid = {*self.refused, *self._without}
        return [
            name
            for name in self._reported
            if name not in sys.modules and name not in self._tried and name.partition(".")[0] not in avoid
        ]

    def awaited(self, *requester: int | str) -> list[str]:
        """Return the libraries being imported that the next worker should wait for, or an empty list.

        ``requester``: caller and kind of call of the next worker.
        """
        if self.running is None or self._reporters.isdisjoint(requester):
            return []
        return self.running.libraries() if self.running.without.isdisjoint(requester) else []

    def go_on_without(self, *requester: int | str) -> None:
        """Stop waiting for the running trial.

        ``requester``: caller and kind of call that no longer wait.
        """
        if self.running is not None:
            self.running.without.update(requester)

    def learn(self, names: list[str]) -> None:
        """Import modules. Called in a trial.

        Raises UnfitLibraryError if an import did something that a fork could not undo.
        """
        with self._use.noted():
            import_all(names)
        if _FOR_GPUS in names:
            self._use.note_read(load_for_gpus())
        self._take_over([*self._learned, *(name for name in names if name in sys.modules)])
        self._tried |= set(names)
        self._reported, self._reporters = [], set()

    def _take_over(self, names: list[str]) -> None:
        self._learned = names
        self._tried |= set(names)
        with suppress(OSError), files.replaced(self._file) as new:
            new.write_text(json.dumps(names))
