"""What a fork server knows of the libraries that its workers need."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress

from flower_gpu.isolation.forkserver import identity, libraries
from flower_gpu.isolation.forkserver.fitness import EnvironmentUse
from flower_gpu.isolation.forkserver.session import Growth

#: Of the memory file in which a worker writes what it had to import.
REPORT_NAME = "flower-gpu-imported"


class Learning:
    """Collects what workers had to import, and what of it the server has by now.

    Parameters
    ----------
    use : EnvironmentUse
        Notes which environment variables libraries use.
    file : LearnedFile
        Where the next server of the same name finds what this one has learned.
    without : list of str
        Libraries that are not wanted.

    Attributes
    ----------
    running : Growth, optional
        The fork that is importing something right now.
    """

    def __init__(self, use: EnvironmentUse, file: libraries.LearnedFile, without: list[str]) -> None:
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
            self._write(libraries.imported_since(count, self._folders), report)

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
        found = [name for name in names if libraries.is_installed(name, self._folders)]
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

        Raises
        ------
        UnfitLibraryError
            If a fork could not undo what one of them did.
        """
        with self._use.noted():
            libraries.import_all(names)
        self._learned += [name for name in names if name in sys.modules]
        self._tried |= set(names)
        self._reported, self._reporters = [], set()
        self._file.write(self._learned)
