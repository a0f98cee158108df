"""The libraries of a process that forks workers: imported under watch, and learned from what workers report.

A fork must be able to do what a fresh process can: so none that starts CUDA or a thread stays there.
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

#: Imported by every fork server, as far as they are installed.
ALWAYS = ("numpy", "numpy.random", "torch", "cloudpickle")

# Libraries that start threads when they are imported, and whose forks were seen to work all the same: workers
# that found pyarrow imported build and read data sets of flwr-datasets (benchmarks/isolation/client_task.py).
_THREADS_SURVIVE_FORKS = {"pyarrow"}


# Stands for what load_for_gpus() loads, among the names of modules. From a slow disk it takes minutes, and
# ctypes holds the GIL meanwhile: a server that did it itself would look as if it hung.
_FOR_GPUS: Final = "libraries for GPUs (cuDNN)"

_PACKAGE = __name__.partition(".")[0]


class UnfitLibraryError(BaseException):
    """Importing a library did something that a fork could not undo.

    No ``Exception``: a library that catches those would go on with half of what it does, and may keep that.
    So matplotlib wrote a list of fonts without one of them into the user's cache.

    ``libraries``: top-level names of all that were being imported when it happened.
    """

    def __init__(self, libraries: list[str], what: str) -> None:
        super().__init__(f"{', '.join(libraries)}: importing it {what}")
        self.libraries = libraries


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


def import_all(names: Iterable[str]) -> None:
    """Import modules in turn and skip those that cannot be imported.

    The garbage collector is off meanwhile: modules make little garbage, and looking for it takes long.
    Changes of the root logger are undone, because all workers would inherit them. For example, opacus adds a
    handler, and each line that a worker logs would appear twice.

    Raises UnfitLibraryError if one of them did something that a fork could not undo.
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
    """Import the module of a function, given as ``"package.module:function"``, if it is this package's."""
    if function is not None and _is_ours(function):
        import_module(function.partition(":")[0])


def load_for_gpus() -> set[str]:
    """Load the libraries of the first use of a GPU for all forks of this process.

    Returns the variables that were read. A library that cannot be loaded is left to workers, which tell why.
    """
    for file in frameworks.loaded_on_gpu():
        with suppress(OSError):
            ctypes.CDLL(file)
    return frameworks.read_on_gpu()


@cache
def _has_libraries_for_gpus() -> bool:
    return bool(frameworks.loaded_on_gpu())


def preload_on_cpu(functions: Preload) -> None:
    """Call functions of the user's that load data.

    Raises ConfigError if one of them initialised CUDA, or started threads that a fork would miss.
    Raises Exception: what a function raised.
    """
    before = thread_owners.native_ids()
    for name, kwargs in functions:
        run_preload([(name, kwargs)])
        if cuda_is_touched():
            raise ConfigError(
                f"{name} initialised CUDA, so that no worker could use a GPU: keep the data on the CPU, and "
                "choose the device in the task. Only torch.cuda.is_available() and device_count() may be "
                "asked there"
            )
        if (library := frameworks.with_threads()) is not None:
            raise ConfigError(
                f"{name} computes with {library} in the process that workers are forked from. A fork has no "
                f"threads of {library}, and would wait for them for ever. Load numpy arrays there, and make "
                "tensors, data sets and models in the task"
            )
        if missed := thread_owners.missed_in_fork(before):
            raise ConfigError(
                f"{name} starts threads in the process that workers are forked from ({', '.join(missed)}). A "
                "fork has none of them, and would wait for them for ever. Load the data without threads, or "
                "in the task"
            )
    gc.collect()  # what loading has left: each fork would have it


class _ImportWatch:
    """A finder in front of all others that checks the process after each library's import.

    A check costs as much as a fifth of the imports if it follows each module. So the process is checked only
    where a library ends, or begins to import another one.

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
            self.check()  # what the library has done that imports this one
        self._running.append(library)
        try:
            yield
            if is_another:
                self.check()
        finally:
            self._running.pop()

    def check(self) -> None:
        """Raise UnfitLibraryError if a thread or CUDA was started.

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
            vars(loader).pop(step, None)  # another finder may have wrapped it as well
            with self.importing(library):
                return do(argument)

        setattr(loader, step, watched)


def _thread_count() -> int:
    return len(os.listdir("/proc/self/task"))


@dataclass(frozen=True)
class Growth:
    """A fork of the server that imports libraries and then takes the server's place."""

    pid: int
    report: int  # read end of the pipe on which it reports the outcome
    names: list[str]  # modules that it imports
    deadline: float  # on the clock of ``time.monotonic``
    #: Callers, and kinds of calls, that have waited for it for too long and go on without.
    without: set[int | str] = field(default_factory=set)
    #: Modules that workers have reported since it was forked, by the kind of their calls: it knows nothing of
    #: them. A dict in the place of a set keeps their order.
    reported: dict[str, dict[str, None]] = field(default_factory=dict)

    def libraries(self) -> list[str]:
        """Return the top-level names of the modules that it imports."""
        return list(dict.fromkeys(name.partition(".")[0] for name in self.names))

    def note_later(self, names: Sequence[str], kind: str) -> None:
        """Note the modules of a worker's report that this fork does not import."""
        known = set(self.names)
        if later := [name for name in names if name not in known]:
            self.reported.setdefault(kind, {}).update(dict.fromkeys(later))

    def refused(self) -> set[str] | None:
        """Read the outcome: libraries that did harm, or None if the fork has taken its parent's place.

        At least one of the libraries that it was to import is refused. Otherwise, the next fork would import
        the same ones, and so on for ever. All of them are refused if the fork blames none of them, or died.
        """
        data = os.read(self.report, 1 << 16)
        os.close(self.report)
        blamed = json.loads(data) if data else []
        if blamed is None:
            return None
        asked = set(self.libraries())
        return {*blamed} if asked & {*blamed} else {*blamed, *asked}


def learned_file(name: str) -> Path:
    """Return the file with the libraries that workers of a fork server needed, for the next of this name."""
    return sockets.folder() / f"{name}.libraries"


def imported_since(count: int, folders: Sequence[str]) -> list[str]:
    """Return the modules of installed packages that were imported since, in their order."""
    prefixes = tuple(os.path.join(folder, "") for folder in folders)
    # Only the last ones: in a fork each object that is looked at is a page to be copied.
    last = list(islice(reversed(sys.modules), max(0, len(sys.modules) - count)))
    found = []
    for name in reversed(last):
        spec = getattr(sys.modules[name], "__spec__", None)
        origin = getattr(spec, "origin", None)
        # By its own name and from a file: not what libraries put into sys.modules by hand.
        if spec is None or spec.name != name or not isinstance(origin, str):
            continue
        if _is_ours(name) or origin.startswith(prefixes):
            found.append(name)
    return found


def is_installed(name: str, folders: Sequence[str]) -> bool:
    """Tell whether a module is one of an installed package; nothing is imported."""
    with suppress(ValueError, ImportError):
        return _is_ours(name) or PathFinder.find_spec(name.partition(".")[0], folders) is not None
    return False


def _is_ours(name: str) -> bool:
    """Tell whether a module is this package's: installed in place it is in no folder of installed packages.

    Whoever edits it gets another fork server.
    """
    return name.partition(".")[0] == _PACKAGE


class Learning:
    """Collects workers' imports, and those that the server ``name`` has made itself.

    ``use``: notes which environment variables libraries use.
    ``without``: libraries that it must not have.
    ``running``: the fork that is importing something right now.
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
        """Return the names of the libraries that were learned."""
        return sorted({name.partition(".")[0] for name in self._learned})

    def begin(self) -> None:
        """Import the libraries of every server, and those that an earlier one has learned.

        Raises Exception where that cannot be: the next one comes up without what was learned, also after an
        end of this process.
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
        """Return the imports of this worker and its forks since there were ``count`` modules."""
        own = imported_since(count, self._folders)
        return list(dict.fromkeys([*own, *(facts.imported_by_forks or ())]))

    def installed(self, names: Sequence[str]) -> list[str]:
        """Return the modules of installed libraries among these: others may change while this server runs."""
        return [name for name in names if is_installed(name, self._folders)]

    def ask_for_gpus(self, *whose: int | str) -> None:
        """Note that workers are to use a GPU; their libraries for that are loaded once."""
        if _FOR_GPUS not in self._tried and _has_libraries_for_gpus():
            self.note([_FOR_GPUS], *whose)

    def note(self, names: Sequence[str], *whose: int | str) -> None:
        """Note a worker's imports. ``whose``: its caller, and the kind of call."""
        self._reported = list(dict.fromkeys([*self._reported, *names]))
        self._reporters.update(whose)

    def wanted(self) -> list[str]:
        """Return the modules that should be imported, in their order: each is tried once."""
        avoid = {*self.refused, *self._without}
        return [
            name
            for name in self._reported
            if name not in sys.modules and name not in self._tried and name.partition(".")[0] not in avoid
        ]

    def awaited(self, *whose: int | str) -> list[str]:
        """Return the libraries that are being imported and that the next worker of these needs, too."""
        if self.running is None or self._reporters.isdisjoint(whose):
            return []
        return self.running.libraries() if self.running.without.isdisjoint(whose) else []

    def go_on_without(self, *whose: int | str) -> None:
        """Have these no longer wait for what is being imported now."""
        if self.running is not None:
            self.running.without.update(whose)

    def learn(self, names: list[str]) -> None:
        """Import modules, in a fork of the server.

        Raises UnfitLibraryError if a fork could not undo what one of them did.
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
