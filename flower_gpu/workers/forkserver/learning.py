"""What a fork server knows of the libraries that its workers need."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.machinery import (
    PathFinder,
)
from itertools import islice

from flower_gpu import files
from flower_gpu.workers.forkserver import identity, libraries, sockets
from flower_gpu.workers.forkserver.fitness import EnvironmentUse


@dataclass(frozen=True)
class Growth:
    """A fork that imports libraries: its process, where it tells how that went, what, and how long it may."""

    pid: int
    report: int
    names: list[str]
    deadline: float


class LearnedFile:
    """The libraries that workers of a fork server needed, kept for the next one of the same name."""

    def __init__(self, name: str) -> None:
        self._path = sockets.folder() / f"{name}.libraries"
        self.names: list[str] = []

    def exists(self) -> bool:
        """Tell whether there is something to take."""
        return self._path.exists()

    def take(self) -> None:
        """Read the file and remove it: if a library ends this process, the next one comes up without."""
        with suppress(OSError, ValueError):
            names = json.loads(self._path.read_text())
            self._path.unlink()
            self.names = [name for name in names if isinstance(name, str)]

    def write(self, names: Sequence[str]) -> None:
        """Keep ``names``."""
        self.names = list(names)
        with suppress(OSError), files.replaced(self._path) as new:
            new.write_text(json.dumps(self.names))


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
        if spec is not None and spec.name == name and isinstance(origin, str) and origin.startswith(prefixes):
            found.append(name)
    return found


def is_installed(name: str, folders: Sequence[str]) -> bool:
    """Tell whether a module is one of an installed package; nothing is imported."""
    with suppress(ValueError, ImportError):
        return PathFinder.find_spec(name.partition(".")[0], folders) is not None
    return False


#: Of the memory file in which a worker writes what it had to import.
REPORT_NAME = "flower-gpu-imported"


class Learning:
    """Collects what workers had to import, and what of it the server has by now.

    ``use``: notes which environment variables libraries use.
    ``file``: where the next server of the same name finds what this one has learned.
    ``running``: the fork that is importing something right now.
    """

    def __init__(self, use: EnvironmentUse, file: LearnedFile, without: list[str]) -> None:
        self.running: Growth | None = None
        self.refused: set[str] = set()
        self._without = without
        self._use = use
        self._file = file
        self._folders = identity.installed_folders(sys.path)
        self._learned = list(file.names)
        self._tried = set(file.names)
        self._reported: list[str] = []
        self._reporters: set[int] = set()

    def libraries(self) -> list[str]:
        """Return the names of the libraries that were learned."""
        return sorted({name.partition(".")[0] for name in self._learned})

    def report(self, count: int, report: int) -> None:
        """Write down, in a worker, what it had to import since there were ``count`` modules.

        In the place of what it has written before.
        """
        with suppress(OSError):  # the task has closed all descriptors
            if not os.readlink(f"/proc/self/fd/{report}").startswith(f"/memfd:{REPORT_NAME}"):
                return  # and has opened a file of its own
            self._write(imported_since(count, self._folders), report)

    @staticmethod
    def _write(names: list[str], report: int) -> None:
        data = json.dumps(names).encode()
        os.pwrite(report, data, 0)
        os.ftruncate(report, len(data))

    def take(self, report: int, caller: int) -> None:
        """Read what a worker of the process ``caller`` has written down."""
        size = os.fstat(report).st_size
        if size:
            with suppress(ValueError):  # it was killed while writing
                names = json.loads(os.pread(report, size, 0))
                self._reported = list(dict.fromkeys([*self._reported, *names]))
                self._reporters.add(caller)

    def ask(self, names: Sequence[str], caller: int) -> None:
        """Note what workers of the process ``caller`` are about to import; only installed libraries count."""
        found = [name for name in names if is_installed(name, self._folders)]
        self._reported = list(dict.fromkeys([*self._reported, *found]))
        self._reporters.add(caller)

    def wanted(self) -> list[str]:
        """Return the modules that should be imported, in their order: each is tried once."""
        avoid = {*self.refused, *self._without}
        return [
            name
            for name in self._reported
            if name not in sys.modules and name not in self._tried and name.partition(".")[0] not in avoid
        ]

    def is_worth_waiting(self, caller: int) -> bool:
        """Tell whether the next worker of this process would import what is being imported right now."""
        return self.running is not None and caller in self._reporters

    def learn(self, names: list[str]) -> None:
        """Import modules, in a fork of the server.

        Raises UnfitLibraryError if a fork could not undo what one of them did.
        """
        with self._use.noted():
            libraries.import_all(names)
        self._learned += [name for name in names if name in sys.modules]
        self._tried |= set(names)
        self._reported, self._reporters = [], set()
        self._file.write(self._learned)
