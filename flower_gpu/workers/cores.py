"""How many cores this process may use, and how many threads a worker gets of them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from flower_gpu import control_group
from flower_gpu.options import CONCURRENCY_VARIABLE, value_of

# As OpenMP reads it: a number, or one for each level of nesting.
_THREADS = re.compile(r"\s*\+?(\d{1,20})\s*(?:,\s*\+?0*[1-9]\d*\s*)*", re.ASCII)
_MAX_THREADS = 2**31 - 1  # a C int


def planned_threads(environ: Mapping[str, str]) -> int:
    """Return how many threads torch and OpenMP use in a worker with these environment variables.

    The user's own ``OMP_NUM_THREADS``, or an equal share of the cores (``FLOWER_GPU_CONCURRENCY``). The
    load at the moment plays no part: another number of threads gives other bits.

    Raises ConfigError if ``FLOWER_GPU_CONCURRENCY`` is no whole number from 1 on.
    """
    at_once = value_of(CONCURRENCY_VARIABLE, environ)
    return openmp_threads(environ) or max(1, cores() // at_once)


def openmp_threads(environ: Mapping[str, str], variable: str = "OMP_NUM_THREADS") -> int | None:
    """Return the number of threads that a variable asks for; None where OpenMP ignores its value."""
    found = _THREADS.fullmatch(environ.get(variable, ""))
    threads = int(found[1]) if found else 0
    return threads if 1 <= threads <= _MAX_THREADS else None


def cores() -> int:
    """Count the cores that this process may use, by its affinity and by the quotas of its control groups.

    Of a quota of 2.5 processors 2 are counted: a thread that gets half of a processor holds up the others.
    """
    quota = control_group.cpu_quota()
    return processor_cores() if quota is None else max(1, min(processor_cores(), int(quota)))


def processor_cores() -> int:
    """Count the cores on which this process may run, however much time it may have of them."""
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS
    return _cores_of(frozenset(affinity(0))) if affinity else os.cpu_count() or 1


@cache
def _cores_of(cpus: frozenset[int]) -> int:
    # The two CPUs of a core share what computes: PyTorch starts one thread for both, too.
    siblings = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    try:
        return len({Path(siblings.format(cpu)).read_text() for cpu in cpus})
    except OSError:
        return len(cpus)
