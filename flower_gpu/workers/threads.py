"""The threads of a worker: its part of the cores, set in its native libraries.

A fresh interpreter needs nothing more: the libraries read ``OMP_NUM_THREADS`` when they are loaded. Where a
worker finds them loaded, as in a fork, :func:`apply` brings them to what they would have read: torch, OpenMP
runtimes, BLAS libraries.
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

#: Variables for a process that imports libraries and then forks: their threads would not survive that.
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
# How file names begin; functions to get and to set the count, in each spelling there is; variables that the
# library puts before OMP_NUM_THREADS.
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
    variables: tuple[str, ...]  # which the library puts before OMP_NUM_THREADS
    most: Callable[[], int] | None = None  # threads that it takes from its variables
    starts_threads: bool = False  # as soon as the count is set

    def count(self, environ: Mapping[str, str]) -> int | None:
        """Return the count that the library would have read from these variables."""
        read = (openmp_threads(environ, name) for name in (*self.variables, VARIABLE))
        count = next((number for number in read if number is not None), None)
        return count if count is None or self.most is None else min(count, self.most())


def of_worker(planned: int, env: Mapping[str, str], *, takes_over: bool) -> int:
    """Return the thread count of a worker that this process is about to start.

    ``env``: the worker's environment variables, as the user gave them for this call.
    ``takes_over``: whether the worker has the count that was set here, for example by
    ``torch.set_num_threads``.
    """
    if not takes_over or openmp_threads(env) is not None:
        return planned
    return _set_in_framework() or planned


def environment(count: int, env: Mapping[str, str]) -> dict[str, str]:
    """Return ``env`` with the variable for ``count`` threads.

    A user's value that says the same number stays as it is: it may say more, as ``"4,2"``.
    """
    effective = ChainMap(env, os.environ)  # type: ignore[arg-type]  # a copy of all is slow
    text = effective[VARIABLE] if openmp_threads(effective) == count else str(count)
    return {**env, VARIABLE: text}


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of an environment for :func:`prepare`."""
    names = (VARIABLE, *(name for _, _, names in _KINDS for name in names))
    return {name: environ[name] for name in names if name in environ}


def prepare(environ: Mapping[str, str]) -> None:
    """Prepare a process for forks: steps that are too late, or slow, in the fork.

    A thread of OpenBLAS computes for a while when it starts, without any work: it waits in a loop. So the
    count is set here, where the fork itself ends the threads again; the child starts as many when it
    multiplies matrices, and not before. ``environ``: of the worker that is to be forked.
    """
    _adjust([pool for pool in _pools() if pool.starts_threads], environ)


@contextmanager
def prepared(environ: Mapping[str, str]) -> Iterator[None]:
    """:func:`prepare` for forks within the block; afterwards this process has its own counts again."""
    with restored([pool for pool in _pools() if pool.starts_threads]):
        prepare(environ)
        yield


def release_openmp_threads() -> None:
    """End the idle OpenMP threads of the calling thread, so that a fork of it can start its own.

    A forked child inherits libgomp's record of its thread pool but not the threads, and waits for them
    for ever in its first parallel region. OpenMP starts new threads when it needs them again.
    """
    try:
        if sum(1 for _ in os.scandir("/proc/self/task")) == 1:
            return
    except OSError:
        return
    for library in _loaded_libraries():  # wheels bring their own copies (torch, scikit-learn)
        if "libgomp" not in library:
            continue
        try:
            ctypes.CDLL(library, mode=os.RTLD_NOLOAD | os.RTLD_LAZY).omp_pause_resource_all(_OMP_PAUSE_HARD)
        except (OSError, AttributeError):  # unloaded meanwhile, or older than OpenMP 5.0
            continue


def apply(environ: Mapping[str, str] = os.environ) -> None:
    """Give each loaded library the thread count of a fresh process with these variables.

    Loads nothing. For OpenMP the count is that of the calling thread; other threads begin with what the
    library read when it was loaded.
    """
    _adjust(_pools(), environ)


def follow(applied: Mapping[str, str]) -> None:
    """Apply the user's changes of ``os.environ`` since ``applied`` was applied.

    Modules do so before they import torch. Where torch is loaded already, it is done here; not in a library
    whose count was set directly meanwhile.
    """
    if os.environ.get(VARIABLE) != applied.get(VARIABLE):
        _adjust([pool for pool in _pools() if pool.get() == pool.count(applied)], os.environ)


@contextmanager
def restored(pools: list[_Pool] | None = None) -> Iterator[None]:
    """Give libraries, by default all that are loaded, their present thread counts again after the block."""
    before = [(pool, pool.get()) for pool in (_pools() if pools is None else pools)]
    try:
        yield
    finally:
        _set(before)


def _adjust(pools: list[_Pool], environ: Mapping[str, str]) -> None:
    counts = [(pool, pool.count(environ)) for pool in pools]  # before one of them changes another's
    _set([(pool, count) for pool, count in counts if count is not None])


def _set(counts: list[tuple[_Pool, int]]) -> None:
    for pool, count in counts:
        # What torch answers is the number of its OpenMP runtime; it has more of them, as for new threads.
        if not pool.starts_threads or pool.get() != count:
            pool.set(count)


def _pools() -> list[_Pool]:
    return _find_pools(len(sys.modules))  # libraries come with modules


# To find them takes longest, and most in a new fork, which has to copy every page that it touches: with torch
# 1.5 ms, and with threadpoolctl 6 ms, after an import of 7 ms.
@lru_cache(maxsize=1)
def _find_pools(_modules: int) -> list[_Pool]:
    pools = [pool for path in _loaded_libraries() if (pool := _library_pool(path)) is not None]
    # Last: a framework's OpenMP runtime is among the libraries.
    return pools + [_framework_pool(own) for own in _threads_of_frameworks()]


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
                    return replace(pool, most=_usable_cpus, starts_threads=True)
                return pool
    return None


def _threads_of_frameworks() -> list[Threads]:
    return [own for framework in frameworks.loaded() if (own := framework.threads()) is not None]


def _framework_pool(own: Threads) -> _Pool:
    def most() -> int:
        return max(processor_cores(), own.get())  # more than there are cores: the caller has set that

    return _Pool(own.get, own.set, own.variables, most if own.at_most_cores else None)


def _set_in_framework() -> int | None:
    """Return the count that ``torch.set_num_threads``, or another framework's, was called with here."""
    # What a framework begins with is one of these, depending on how it was built.
    read = {openmp_threads(os.environ, name) for name in (VARIABLE, "MKL_NUM_THREADS")}
    own = {*read, processor_cores(), _usable_cpus(), control_group.processors()}
    return next((count for each in _threads_of_frameworks() if (count := each.get()) not in own), None)


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

    From the dynamic linker itself: ``/proc/self/maps`` of a process with torch takes the kernel many times
    longer to write than this list takes to read.
    """
    program = ctypes.CDLL(None)
    if not hasattr(program, "dlinfo"):  # macOS, where no worker begins with libraries
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


# As OpenMP reads it: a number, or one for each level of nesting.
_THREADS = re.compile(r"\s*\+?(\d{1,20})\s*(?:,\s*\+?0*[1-9]\d*\s*)*", re.ASCII)
_MAX_THREADS = 2**31 - 1  # a C int


def planned_threads(environ: Mapping[str, str]) -> int:
    """Return how many threads torch and OpenMP use in a worker with these environment variables.

    The user's own ``OMP_NUM_THREADS``, or as many as the call asks for cores (``FLOWER_GPU_NUM_CPUS``), or an
    equal share of the cores (``FLOWER_GPU_CONCURRENCY``). The load at the moment plays no part: another
    number of threads gives other bits.
    """
    return openmp_threads(environ) or threads_for(CALL["num_cpus"].resolve(None, environ), environ)


def threads_for(num_cpus: float | None, environ: Mapping[str, str]) -> int:
    """Return the threads of a call that asks for this many cores; None: for an equal share of them."""
    at_once = CONCURRENCY.resolve(None, environ)
    return max(1, cores() // at_once if num_cpus is None else int(num_cpus))


def openmp_threads(environ: Mapping[str, str], variable: str = "OMP_NUM_THREADS") -> int | None:
    """Return the number of threads that a variable asks for; None where OpenMP ignores its value."""
    found = _THREADS.fullmatch(environ.get(variable, ""))
    threads = int(found[1]) if found else 0
    return threads if 1 <= threads <= _MAX_THREADS else None


def cores() -> int:
    """Count the cores that this process may use, by its affinity and by the quotas of its control groups.

    Of a quota of 2.5 processors 2 are counted: a thread that gets half of a processor holds up the others.
    """
    return max(1, int(available_cores()))


def available_cores() -> float:
    """Return the cores that this process may use, with the fraction of a quota."""
    limit = control_group.cores_limit()
    return processor_cores() if limit is None else min(processor_cores(), limit.cores)


def processor_cores() -> int:
    """Count the cores on which this process may run, however much time it may have of them."""
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS
    return control_group.cores_of(frozenset(affinity(0))) if affinity else control_group.all_cores()
