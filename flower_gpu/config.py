"""Settings of a call, and the one table of environment variables."""

from __future__ import annotations

import math
import os
import re
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from flower_gpu import control_group
from flower_gpu.errors import ConfigError
from flower_gpu.printable import path_text

#: How a worker can be started; docs/explanation/isolation.md has their costs and guarantees.
START_METHODS: Final = ("auto", "forkserver", "spawn", "fork", "inline", "in-process")

#: Every environment variable the package reads (docs/reference/environment.md is tested against it).
ENVIRONMENT: Final = MappingProxyType(
    {
        "FLOWER_GPU_START_METHOD": "Start method of workers when the code names none.",
        "FLOWER_GPU_TIMEOUT_S": "Time limit of a call in seconds when the code names none.",
        "FLOWER_GPU_RUN_DIR": "Folder of the run; when set, events are appended to trace.jsonl in it.",
        "FLOWER_GPU_STATE_DIR": "Folder for flower-gpu-<uid>: what this user's processes share on this host.",
        "FLOWER_GPU_SERVER_IDLE_S": "Seconds after which a fork server that nobody uses ends.",
        "FLOWER_GPU_CLIENT": "Name of this process's client in the trace and in log lines.",
        "FLOWER_GPU_CONCURRENCY": "How many workers may run at the same time; they share the cores.",
        "FLOWER_GPU_POLICY": "This node's device policy: never, offer, force or require.",
        "FLOWER_GPU_NUM": "The GPUs of this node: numbers or UUIDs, separated by commas.",
        "FLOWER_GPU_NUM_GPUS": "GPUs of a call, or the share of one, when the code names neither.",
        "FLOWER_GPU_MEMORY": "GPU memory of a call, such as 2GiB, when the code names neither.",
        "FLOWER_GPU_PLACEMENT": "Whether leases spread over the GPUs or pack them: spread or pack.",
        "FLOWER_GPU_RESERVE": "Memory of each GPU that is never leased, such as 256MiB.",
        "FLOWER_GPU_LEASE_TIMEOUT_S": "Seconds a call may wait for its lease when the code names none.",
        "FLOWER_GPU_ROUND_TIMEOUT_S": "Seconds after which a round is over and its calls are not started.",
        "FLOWER_GPU_ON_OOM": "What follows when a call runs out of GPU memory: retry, cpu or fail.",
        "FLOWER_GPU_LEDGER_DIR": "Folder that the ledger's users share; /tmp by default.",
        "FLOWER_GPU_POLL_S": "Least seconds between a SuperNode's questions to its SuperLink.",
        "FLOWER_GPU_SUPERNODE": "Set in SuperNodes: lease, or start where apps take leases themselves.",
        "FLOWER_GPU_SLOTS": "Set in SuperNodes: folder of the locks by which messages wait for each other.",
        "FLOWER_GPU_LEASE": "Set in workers: the lease they hold.",
        "FLOWER_GPU_RANKS": "Set in workers of calls for several GPUs: how many ranks run without a lease.",
        "FLOWER_GPU_DEADLINE": "Set in workers of calls for several GPUs: their end, by time.monotonic().",
    }
)

RANKS_VARIABLE: Final = "FLOWER_GPU_RANKS"
DEADLINE_VARIABLE: Final = "FLOWER_GPU_DEADLINE"
START_METHOD_VARIABLE: Final = "FLOWER_GPU_START_METHOD"
POLL_VARIABLE: Final = "FLOWER_GPU_POLL_S"
CONCURRENCY_VARIABLE: Final = "FLOWER_GPU_CONCURRENCY"
RUN_DIR_VARIABLE: Final = "FLOWER_GPU_RUN_DIR"

#: The longest time that can be set, 31 years. Clocks and timers of the system overflow above.
MAX_SECONDS: Final = 1e9

# As OpenMP reads it: a number, or one for each level of nesting.
_THREADS = re.compile(r"\s*\+?(\d{1,20})\s*(?:,\s*\+?0*[1-9]\d*\s*)*", re.ASCII)
_MAX_THREADS = 2**31 - 1  # a C int


@dataclass(frozen=True)
class WorkerSettings:
    """How calls are run.

    Parameters
    ----------
    start_method : str
        One of :data:`START_METHODS`.
    timeout_s : float, optional
        Seconds a call may take, counted from its lease, start of the worker included. None: no limit.
    env : mapping of str to str
        Environment variables of the worker, set before anything heavy is imported.
    name : str, optional
        The client's name in the trace and in messages.
    threads : int
        How many threads torch and OpenMP use in a worker.
    preload : tuple of (str, mapping)
        Functions to call once for all workers, with their keyword arguments.
    """

    start_method: str = "auto"
    timeout_s: float | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    name: str | None = None
    threads: int = 1
    preload: tuple[tuple[str, Mapping[str, Any]], ...] = ()

    def __post_init__(self) -> None:
        if self.start_method not in START_METHODS:
            raise ConfigError(f"start_method {self.start_method!r} is not one of {', '.join(START_METHODS)}")
        if self.timeout_s is not None and not (
            isinstance(self.timeout_s, int | float) and is_duration(self.timeout_s)
        ):
            raise ConfigError(
                f"timeout_s must be a positive number of seconds or None, not {self.timeout_s!r}"
                f"{too_long(self.timeout_s)}"
            )
        for key, value in self.env.items():
            if not (isinstance(key, str) and isinstance(value, str)):
                raise ConfigError(f"env maps names to strings, not {key!r} to {value!r}")
        object.__setattr__(self, "env", MappingProxyType(dict(self.env)))

    @classmethod
    def resolve(
        cls,
        start_method: str | None = None,
        timeout_s: float | None = None,
        env: Mapping[str, str] | None = None,
        name: str | None = None,
        preload: tuple[tuple[str, Mapping[str, Any]], ...] = (),
        default_name: str | None = None,
    ) -> WorkerSettings:
        """Fill what the code left open from the environment.

        Raises
        ------
        ConfigError
            If a value cannot be used; the message names where it came from.
        """
        variable = START_METHOD_VARIABLE
        if start_method is None and (text := os.environ.get(variable)):
            if text not in START_METHODS:
                raise ConfigError(f"{variable}={text!r} is not one of {', '.join(START_METHODS)}")
            start_method = text
        variable = "FLOWER_GPU_TIMEOUT_S"
        if timeout_s is None and (text := os.environ.get(variable)):
            try:
                timeout_s = float(text)
            except ValueError:
                raise ConfigError(f"{variable}={text!r} is not a number of seconds") from None
        settings = cls(
            start_method=start_method or "auto",
            timeout_s=timeout_s,
            env=env or {},
            name=name or os.environ.get("FLOWER_GPU_CLIENT") or default_name,
            preload=preload,
        )
        return replace(settings, threads=planned_threads({**os.environ, **settings.env}))


def is_duration(value: float) -> bool:
    """Tell whether something can take so many seconds: more than 0, up to :data:`MAX_SECONDS`."""
    return 0 < value <= MAX_SECONDS


def too_long(value: object) -> str:
    """Return what a message adds where a number of seconds is refused because it is too large."""
    is_too_long = isinstance(value, int | float) and value > MAX_SECONDS
    return f" (at most {MAX_SECONDS:g})" if is_too_long else ""


def poll_s(environ: Mapping[str, str]) -> float:
    """Return the least seconds between a SuperNode's questions to its SuperLink: 0.5, if nothing else is set.

    Raises
    ------
    ConfigError
        If ``FLOWER_GPU_POLL_S`` is no positive number.
    """
    text = environ.get(POLL_VARIABLE) or "0.5"
    with suppress(ValueError):
        if is_duration(value := float(text)):
            return value
    raise ConfigError(f"{POLL_VARIABLE}={text!r} is not a positive number of seconds")


def planned_threads(environ: Mapping[str, str]) -> int:
    """Return how many threads torch and OpenMP use in a worker with these environment variables.

    The user's own ``OMP_NUM_THREADS``, or an equal share of the cores (``FLOWER_GPU_CONCURRENCY``). The
    load at the moment plays no part: another number of threads gives other bits.

    Raises
    ------
    ConfigError
        If ``FLOWER_GPU_CONCURRENCY`` is no whole number from 1 on.
    """
    variable = CONCURRENCY_VARIABLE
    text = environ.get(variable) or "1"
    if not (re.fullmatch(r"\s*\d{1,20}\s*", text, re.ASCII) and int(text) >= 1):
        raise ConfigError(f"{variable}={text!r} is not a number of workers, 1 or more")
    return openmp_threads(environ) or max(1, cores() // int(text))


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


def state_parent() -> Path:
    """Folder that the state folder is made in: ``FLOWER_GPU_STATE_DIR``, or ``/tmp``."""
    # Not TMPDIR: it may be another one for each job or session, and they would not meet.
    return Path(os.environ.get("FLOWER_GPU_STATE_DIR") or "/tmp").absolute()


def state_dir() -> Path:
    """Folder in which this user's processes on this host find each other; all in it is this package's.

    A folder of its own below :func:`state_parent`, which may be full of the user's files.
    """
    return state_parent() / f"flower-gpu-{os.getuid()}"


def state_dir_problem() -> tuple[str, str] | None:
    """Return why others could change what is in the state folder, and what to do; None if they cannot.

    Raises
    ------
    OSError
        If the folders cannot be looked at.
    """
    parent, path = state_parent(), state_dir()
    # Not of /tmp itself: in many containers that is an empty volume, not sticky, with nobody else in it.
    if os.environ.get("FLOWER_GPU_STATE_DIR"):
        found = parent.stat()
        is_safe = found.st_uid in (0, os.getuid()) and not found.st_mode & 0o022
        # In a sticky folder nobody can replace what is another account's.
        if not stat.S_ISDIR(found.st_mode) or not (is_safe or found.st_mode & stat.S_ISVTX):
            return (
                f"{path_text(parent)} must be a folder of this user that nobody else can write to",
                "chmod go-w it, or set FLOWER_GPU_STATE_DIR to another folder",
            )
    try:
        found = path.lstat()
    except FileNotFoundError:
        return None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        return (
            f"{path_text(path)} must be a folder of this user that nobody else can write to",
            "remove it, or set FLOWER_GPU_STATE_DIR to another folder",
        )
    return None


def made_state_dir() -> Path:
    """Return the state folder; make it where it is missing.

    Raises
    ------
    ConfigError
        If it is not safe: somebody else could put something of theirs into it.
    OSError
        If it cannot be made.
    """
    path = state_dir()
    with suppress(FileExistsError):
        path.parent.mkdir(mode=0o700, parents=True)
    problem = state_dir_problem()
    if problem is None:
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
        problem = state_dir_problem()  # of the folder itself
    if problem is not None:
        raise ConfigError("; ".join(problem))
    if path.stat().st_mode & 0o777 != 0o700:  # the umask, or an older version
        path.chmod(0o700)
    return path


def server_idle_s() -> float:
    """Seconds after which an unused fork server ends (``FLOWER_GPU_SERVER_IDLE_S``).

    Raises
    ------
    ConfigError
        If it is no number of seconds.
    """
    text = os.environ.get("FLOWER_GPU_SERVER_IDLE_S") or "60"
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not (seconds == 0 or is_duration(seconds)):
        raise ConfigError(f"FLOWER_GPU_SERVER_IDLE_S={text!r} is not a number of seconds{too_long(seconds)}")
    return seconds
