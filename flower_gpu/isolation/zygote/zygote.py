"""What forks the workers of one caller, for as long as that has calls."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

from flower_gpu.errors import FlowerGPUError, WorkerDiedError, WorkerStartError
from flower_gpu.isolation.forkserver import client
from flower_gpu.isolation.zygote.process import Process, UnfitError, ZygoteSettings

_MAX_RENEWALS = 5
_WORKERS_THAT_LACK = 6  # before there is another process: to start it takes seconds of a core


class Zygote:
    """What forks the workers of one caller: one process after another, each with what the last one lacked.

    Parameters
    ----------
    settings : ZygoteSettings
        What the first one is started with.
    """

    def __init__(self, settings: ZygoteSettings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._current: Process | None = None
        self._earlier: list[Process] = []
        self._is_closed = False
        self._known = set(settings.modules)
        self._unfit: set[str] = set()
        self._lacking = 0  # workers that had to import what the process had not
        self._renewals = 0
        self._renewing: threading.Thread | None = None

    def process(self) -> Process:
        """Return the process that forks new workers; start it where there is none.

        Raises
        ------
        WorkerStartError
            If it cannot be started.
        """
        with self._lock:
            if self._is_closed:
                raise WorkerStartError("this caller wants no more workers")
            if self._current is not None and self._current.has_ended():
                self._current.close()
                self._current = None
            if self._current is None:
                self._current = self._start()
            return self._current

    def imported(self, names: Sequence[str], *, at_once: bool = False) -> None:
        """Take note of libraries that a worker had to import: after a few, a new process has them.

        Parameters
        ----------
        names : sequence of str
            Modules.
        at_once : bool
            Not after a few: the worker was ended by its time limit, and the next ones will be as well.
        """
        with self._lock:
            new = [name for name in names if name not in self._known]
            self._lacking += bool(new)
            if (
                (self._lacking < _WORKERS_THAT_LACK and not at_once)
                or not new
                or self._is_closed
                or self._renewals >= _MAX_RENEWALS
                or (self._renewing is not None and self._renewing.is_alive())
            ):
                return
            self._known.update(new)
            self._lacking = 0
            self._renewals += 1
            self._renewing = threading.Thread(target=self._renew, args=(new,), daemon=True)
            self._renewing.start()

    def close(self) -> None:
        """End it and all its workers."""
        with self._lock:
            self._is_closed = True
            processes = [*self._earlier, *([self._current] if self._current is not None else [])]
        for process in processes:
            process.close()

    def _renew(self, names: list[str]) -> None:
        settings = replace(self._settings, modules=(*self._settings.modules, *names))
        try:
            if settings.start_method == "forkserver":
                client.learn(names, settings.without)  # it tries whether they survive a fork
            new = self._started(settings)
        except (FlowerGPUError, OSError):  # one of them ends a process: the one that is there goes on without
            return
        with self._lock:
            self._settings = settings
            old, self._current = self._current, new
            if old is not None:
                self._earlier.append(old)
        if old is not None:
            old.drain()
        if self._is_closed:
            new.close()

    def _start(self) -> Process:
        try:
            return self._started(self._settings)
        except WorkerDiedError:
            if not self._settings.modules:
                raise
        self._settings = replace(self._settings, modules=(), rehearsal=None)
        return self._started(self._settings)

    def _started(self, settings: ZygoteSettings) -> Process:
        while True:
            modules = [name for name in settings.modules if name.partition(".")[0] not in self._unfit]
            try:
                return Process(replace(settings, modules=modules))
            except UnfitError as error:
                if not error.libraries - self._unfit:
                    raise WorkerStartError(f"the zygote cannot do without {error}") from error
                self._unfit |= error.libraries
