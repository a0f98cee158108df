"""The thread counts of a worker's native libraries, which follow its share of the cores.

Libraries read ``OMP_NUM_THREADS`` when they are loaded, so a fresh interpreter needs only that variable. A
fork begins with loaded libraries. There, :func:`apply` sets the counts that torch, OpenMP runtimes and BLAS
libraries would have read.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Final

from flower_gpu import control_group, frameworks
from flower_gpu.frameworks.framework import Threads
from flower_gpu.options import CALL, CONCURRENCY

VARIABLE: Final = "OMP_NUM_THREADS"

#: Variables for a process that imports libraries and then forks, because their threads would not survive.
ONE_THREAD: Final = MappingProxyType({VARIABLE: "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"})

#: :func:`apply`, as the ``setup`` of a call.
SETUP: Final = "flower_gpu.workers.threads:apply"

_OMP_PAUSE_HARD = 2  # omp_pause_resource_t in the OpenMP 5.0 specification, section 3.2.43
_RTLD_DI_LINKMAP = 2  # of dlinfo(3), in glibc and musl

_OPENBLAS = [
    (f"{prefix}openblas_get_num_threads{suffix}", f"{prefix}openblas_set_num_threads{suffix}")
    for prefix in ("scipy_", "")
    for suffix in ("64_", "", "_64")
]
# Each entry: prefixes of file names; functions that get and set the count, in every spelling; variables that
# take precedence over OMP_NUM_THREADS in the library.
_KINDS: Final = (
    (("libgomp", "libiomp5", "libomp"), [("omp_get_max_threads", "omp_set_num_threads")], ()),
    (
        ("libscipy_openblas", "libopenblas", "libblas"),
        _OPENBLAS,
        ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS"),
    ),
    (("libmkl_rt",), [("MKL_Get_Max_Threads", "MKL_Set_Num_Threads")], ("MKL_NUM_THREADS",)),
    (("libblis",), [("bli_thread_get_num_threads", "bli_thread_set_num_threads")], ("BLIS_NUM_THREADS",)),
)


@dataclass(frozen=True)
class _Pool:
    """The threads of one loaded library."""

    get: Callable[[], int]
    set: Callable[[int], object]
    variables: tuple[str, ...]  # variables that take precedence over OMP_NUM_THREADS
    limit: Callable[[], int] | None = None  # limit for a count from variables
    starts_threads: bool = False  # True if threads start as soon as the count is set

    def count(self, environ: Mapping[str, str]) -> int | None:
        """Return the count that the library would have read from these variables."""
        read = (openmp_threads(environ, name) for name in (*self.variables, VARIABLE))
        count = next((number for number in read if number is not None), None)
        return count if count is None or self.limit is None else min(count, self.limit())


def of_worker(planned: int, env: Mapping[str, str], *, takes_over: bool) -> int:
    """Return the thread count of a worker that this process is about to start.

    ``env``: environment variables that the user gave for this call.
    ``takes_over``: True if the worker takes over a count that was set in this process, for example with
    ``torch.set_num_threads``.
    """
    if not takes_over or openmp_threads(env) is not None:
        return planned
    return _set_in_framework() or planned


def environment(count: int, env: Mapping[str, str] = MappingProxyType({})) -> dict[str, str]:
    """Return the variable for ``count`` threads.

    A user's value in ``env`` or in this process with the same count is kept, because it may contain more, as
    in ``"4,2"``.
    """
    # A ChainMap, because copying the whole environment is slow.
    effective = ChainMap(env, os.environ)  # type: ignore[arg-type]
    return {VARIABLE: effective[VARIABLE] if openmp_threads(effective) == count else str(count)}


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of an environment that :func:`prepare` needs."""
    names = (VARIABLE, *(name for _, _, names in _KINDS for name in names))
    return {name: environ[name] for name in names if name in environ}


def prepare(environ: Mapping[str, str]) -> None:
    """Prepare a process for forks with steps that would be slow or too late in the fork.

    A thread of OpenBLAS uses a core for a while after its start, because it waits for work in a loop. So the
    count is set before the fork, which ends these threads again. The child starts its threads only when it
    first multiplies matrices.

    ``environ``: environment variables of the worker that will be forked.
    """
    _adjust([pool for pool in _pools() if pool.starts_threads], environ)


@contextmanager
def prepared(environ: Mapping[str, str]) -> Iterator[None]:
    """Call :func:`prepare` for forks within the block, and restore this process's own counts afterwards."""
    with restored([pool for pool in _pools() if pool.starts_threads]):
        prepare(environ)
        yield


def release_openmp_threads() -> None:
    """End the idle OpenMP threads of the calling thread, so that a fork of it can start its own.

    A forked child inherits libgomp's record of its thread pool, but not the threads. It would wait for them
    forever in its first parallel region. OpenMP starts new threads when it needs them again.
    """
    try:
        if sum(1 for _ in os.scandir("/proc/self/task")) == 1:
            return
    except OSError:
        return
    for library in _loaded_libraries():  # Wheels such as torch and scikit-learn have their own copies.
        if "libgomp" not in library:
            continue
        try:
            ctypes.CDLL(library, mode=os.RTLD_NOLOAD | os.RTLD_LAZY).omp_pause_resource_all(_OMP_PAUSE_HARD)
        except (OSError, AttributeError):  # just unloaded, or older than OpenMP 5.0
            continue


def apply(environ: Mapping[str, str] = os.environ) -> None:
    """Set the thread count of each loaded library as in a fresh process with these variables.

    This function loads no library. For OpenMP, it sets the count of the calling thread. Other threads begin
    with the count that the library read when it was loaded.
    """
    _adjust(_pools(), environ)


def follow(applied: Mapping[str, str]) -> None:
    """Apply changes that the user's modules have made to ``os.environ`` since ``applied`` was applied.

    Modules set the variable before they import torch. If torch is already loaded, the import has no effect,
    so the count is set here. A library keeps a count that was set directly in the meantime.
    """
    if os.environ.get(VARIABLE) != applied.get(VARIABLE):
        _adjust([pool for pool in _pools() if pool.get() == pool.count(applied)], os.environ)


@contextmanager
def restored(pools: list[_Pool] | None = None) -> Iterator[None]:
    """Restore the thread counts of libraries after the block; by default, of all loaded libraries."""
    previous = [(pool, pool.get()) for pool in (_pools() if pools is None else pools)]
    try:
        yield
    finally:
        _set(previous)


def _adjust(pools: list[_Pool], environ: Mapping[str, str]) -> None:
    # All counts are read first, because setting a count may change the count of another library.
    counts = [(pool, pool.count(environ)) for pool in pools]
    _set([(pool, count) for pool, count in counts if count is not None])


def _set(counts: list[tuple[_Pool, int]]) -> None:
    for pool, count in counts:
        # torch is always set. It reports the count of its OpenMP runtime, but it has others, such as the
        # count for new threads.
        if not pool.starts_threads or pool.get() != count:
            pool.set(count)


def _pools() -> list[_Pool]:
    # New libraries come with new modules, so the number of modules is the key of the cache.
    return _find_pools(len(sys.modules))


# Finding the libraries is the slowest step, above all in a new fork, which has to copy every page that it
# touches. With torch it takes 1.5 ms. threadpoolctl takes 6 ms, after an import of 7 ms.
@lru_cache(maxsize=1)
def _find_pools(_modules: int) -> list[_Pool]:
    pools = [pool for path in _loaded_libraries() if (pool := _library_pool(path)) is not None]
    # Frameworks come last, because their OpenMP runtimes are among the libraries.
    return pools + [_framework_pool(pool) for pool in _threads_of_frameworks()]


def _library_pool(path: str) -> _Pool | None:
    name = path.rpartition("/")[2]
    for beginnings, functions, variables in _KINDS:
        if not name.startswith(beginnings):
            continue
        try:
            library = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        except OSError:
            return None
        for get, set_ in functions:
            if hasattr(library, set_):
                pool = _Pool(getattr(library, get), getattr(library, set_), variables)
                if functions is _OPENBLAS:
                    return replace(pool, limit=_usable_cpus, starts_threads=True)
                return pool
    return None


def _threads_of_frameworks() -> list[Threads]:
    return [pool for framework in frameworks.loaded() if (pool := framework.threads()) is not None]


def _framework_pool(pool: Threads) -> _Pool:
    def limit() -> int:
        # A present count above the number of cores was set by the caller.
        return max(processor_cores(), pool.get())

    return _Pool(
        pool.get,
        pool.set,
        pool.variables,
        limit if pool.at_most_cores else None,
    )


def _set_in_framework() -> int | None:
    """Return the count that this process has set in a framework, for example with ``torch.set_num_threads``.

    None if it has set no count.
    """
    # A framework's default is one of these numbers, depending on how the framework was built. Any other count
    # was set by code of this process.
    read = {openmp_threads(os.environ, name) for name in (VARIABLE, "MKL_NUM_THREADS")}
    defaults = {*read, processor_cores(), _usable_cpus(), control_group.processors()}
    return next((count for pool in _threads_of_frameworks() if (count := pool.get()) not in defaults), None)


def _usable_cpus() -> int:
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else control_group.processors()


class _LinkMap(ctypes.Structure):
    """A loaded library in the dynamic linker's list (link.h)."""


_LinkMap._fields_ = [
    ("l_addr", ctypes.c_size_t),
    ("l_name", ctypes.c_char_p),
    ("l_ld", ctypes.c_void_p),
    ("l_next", ctypes.POINTER(_LinkMap)),
    ("l_prev", ctypes.POINTER(_LinkMap)),
]


def _loaded_libraries() -> list[str]:
    """Return the paths of the shared libraries of this process.

    The list comes from the dynamic linker. With torch, the kernel takes many times longer to write
    ``/proc/self/maps`` than it takes to read this list.
    """
    program = ctypes.CDLL(None)
    # macOS has no dlinfo. There, no worker begins with loaded libraries.
    if not hasattr(program, "dlinfo"):
        return []
    entry = ctypes.POINTER(_LinkMap)()
    handle = ctypes.c_void_p(program._handle)
    if program.dlinfo(handle, _RTLD_DI_LINKMAP, ctypes.byref(entry)) != 0:
        return []
    paths = []
    while entry:
        library = entry.contents
        if library.l_name:
            paths.append(os.fsdecode(library.l_name))
        entry = library.l_next
    return paths


# The format of OpenMP: a number, or a list of numbers for the levels of nesting.
_THREADS = re.compile(r"\s*\+?(\d{1,20})\s*(?:,\s*\+?0*[1-9]\d*\s*)*", re.ASCII)
_MAX_THREADS = 2**31 - 1  # a C int


def planned_threads(environ: Mapping[str, str]) -> int:
    """Return the number of threads of torch and OpenMP in a worker with these environment variables.

    This is the user's ``OMP_NUM_THREADS``, or the number of cores that the call asks for
    (``FLOWER_GPU_NUM_CPUS``), or an equal share of the cores (``FLOWER_GPU_CONCURRENCY``). The current load
    does not count, because results differ in their last bits if the number of threads differs.
    """
    return openmp_threads(environ) or threads_for(CALL["num_cpus"].resolve(None, environ), environ)


def threads_for(num_cpus: float | None, environ: Mapping[str, str]) -> int:
    """Return the number of threads of a call that asks for ``num_cpus`` cores; None means an equal share."""
    concurrency = CONCURRENCY.resolve(None, environ)
    return max(1, cores() // concurrency if num_cpus is None else int(num_cpus))


def openmp_threads(environ: Mapping[str, str], variable: str = "OMP_NUM_THREADS") -> int | None:
    """Return the number of threads in a variable; None if OpenMP ignores its value."""
    match = _THREADS.fullmatch(environ.get(variable, ""))
    threads = int(match[1]) if match else 0
    return threads if 1 <= threads <= _MAX_THREADS else None


def cores() -> int:
    """Return the number of cores that this process may use, by its affinity and its control groups' quotas.

    A quota of 2.5 processors counts as 2, because a thread with half of a processor would hold up the others.
    """
    return max(1, int(available_cores()))


def available_cores() -> float:
    """Return the number of cores that this process may use, including the fraction of a quota."""
    limit = control_group.cores_limit()
    return processor_cores() if limit is None else min(processor_cores(), limit.cores)


def processor_cores() -> int:
    """Return the number of cores on which this process may run, regardless of quotas."""
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS
    return control_group.cores_of(frozenset(affinity(0))) if affinity else control_group.all_cores()
