"""What a child process inherits from the one that starts it.

A worker of the fork server gets it from its caller, as if that had started it.
"""

from __future__ import annotations

import os
import resource
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

#: Resource limits of this system, without the one that two names have.
LIMITS = sorted({getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")})

#: Limits that a server must have itself: of the size of threads' stacks, which is read when a program starts,
#: and of memory, which could be less than what the libraries of another server take.
SHAPING_LIMITS = (resource.RLIMIT_STACK, resource.RLIMIT_AS, resource.RLIMIT_DATA)


@dataclass(frozen=True)
class Inherited:
    """Attributes of a process that its children share. Plain values, so that they can travel as JSON.

    Parameters
    ----------
    environ : dict of str to str
        All environment variables.
    path : list of str
        ``sys.path``.
    umask : int
        File mode creation mask.
    cpus : list of int
        Processors it may run on.
    limits : dict of str to [int, int]
        Soft and hard resource limits by number.
    """

    environ: dict[str, str]
    path: list[str]
    umask: int
    cpus: list[int] = field(default_factory=list)
    limits: dict[str, list[int]] = field(default_factory=dict)

    @classmethod
    def of_this_process(cls, env: dict[str, str]) -> Inherited:
        """Collect the attributes of this process, with ``env`` on top of its environment."""
        return cls(
            environ={**os.environ, **env},
            path=[entry for entry in sys.path if isinstance(entry, str)],
            umask=_umask(),
            cpus=sorted(os.sched_getaffinity(0)),
            limits={str(number): list(resource.getrlimit(number)) for number in LIMITS},
        )

    def apply(self, folder: int) -> None:
        """Take them over, in a process that is there for one caller only.

        Parameters
        ----------
        folder : int
            Descriptor of the caller's working directory.
        """
        os.environ.clear()
        os.environ.update(self.environ)
        sys.path[:] = self.path
        os.umask(self.umask)
        for step in (lambda: os.fchdir(folder), lambda: os.sched_setaffinity(0, self.cpus)):
            _try(step)  # the folder was removed; processors went away
        for number, (soft, hard) in self.limits.items():
            _try(resource.setrlimit, int(number), (soft, hard))
        tempfile.tempdir = None  # TMPDIR may be another one


def _try(function: Callable[..., Any], *args: Any) -> None:
    try:
        function(*args)
    except (OSError, ValueError):  # not allowed to: limits above the server's own
        return


def _umask() -> int:
    with open("/proc/self/status") as file:  # os.umask would change it, for other threads too
        for line in file:
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    return 0o022
