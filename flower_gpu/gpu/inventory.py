"""Reads the GPUs of the host: model, memory, processes, and the problem of a GPU that cannot be used.

The driver of the host (:mod:`.drivers`) does the reading, in a thread of its own because it may hang
(:mod:`.query_thread`). A process keeps its session with the driver, because starting one takes long.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from flower_gpu.gpu import drivers
from flower_gpu.gpu.drivers import DriverSession
from flower_gpu.gpu.gpus import GPU, Inventory, Limits, QueryError
from flower_gpu.gpu.query_thread import LateError, QueryThread

T = TypeVar("T")

# Without persistence mode, NVIDIA's driver takes some seconds to start for each GPU.
_START_S, _ANSWER_S = 60.0, 15.0


def take(*, processes: bool = True) -> Inventory:
    """Read the GPUs of the host.

    The first call in a process starts the driver's library. It is started again in a fork, or after other
    code has shut it down. It is shut down after some seconds without a call, before the process forks, and by
    :func:`close`. Safe to call from several threads.

    ``processes``: also list the processes on each GPU, which takes several times as long.
    Never raises, and never blocks for ever. If figures cannot be read, the result gives the reason in words.
    """
    host = _host()
    try:
        return host.ask(lambda: host.take_here(processes))
    except QueryError as late:
        return Inventory((), host.driver_version, str(late), hangs=True)


def take_of(uuids: Sequence[str]) -> tuple[GPU, ...]:
    """Read memory and processes of these GPUs only.

    For workers: the driver does not have to open GPUs outside of their lease.
    """
    with suppress(QueryError):
        return _query(lambda session: session.gpus_with(uuids))
    return ()


def limits(group: Path, uuids: Iterable[str]) -> dict[str, Limits]:
    """Return the limits and the use of a control group on GPUs, by UUID.

    GPUs without support for such limits are left out.
    Raises QueryError if the driver does not answer.
    """
    return _query(lambda session: session.limits(str(group), uuids))


def set_limits(group: Path, limits: Mapping[str, int | None]) -> None:
    """Set the limits of a control group on GPUs, in bytes by UUID. None removes a limit.

    Raises QueryError if the driver does not support limits or denies permission.
    """
    _query(lambda session: session.set_limits(str(group), limits))


def _query(work: Callable[[DriverSession], T]) -> T:
    host = _host()
    return host.ask(lambda: host.with_session(work))


def take_here() -> Inventory:
    """Read the GPUs in the calling thread and shut the driver's library down.

    For processes that must not start threads. Blocks while the driver hangs.
    """
    host = _HostGPUs()
    try:
        return host.take_here()
    finally:
        host.forget()


def temperatures() -> dict[str, int]:
    """Return the temperatures of GPUs in degrees Celsius, by UUID.

    Covers the GPUs found by the last :func:`take` of this process. Empty after :func:`close`.
    """
    host = _host()
    with suppress(QueryError):
        return host.ask(lambda: host.session.temperatures() if host.session else {})
    return {}


def close() -> None:
    """Shut the driver's library down until the next :func:`take`.

    A process with the library has the GPUs' device files open, so an administrator cannot reset the GPUs or
    change their MIG mode.
    """
    _host().thread.close()


class _HostGPUs:
    """The GPUs of this host, with the session of this process. It is started by the first query.

    ``ask`` is called by any thread. All other methods run in the thread for queries, or in the only thread of
    the process.
    """

    def __init__(self) -> None:
        self.thread = QueryThread(self.forget)
        self.session: DriverSession | None = None
        self.driver_version: str | None = None
        self._cuda_version: tuple[int, int] | None = None
        self._last: dict[int, GPU] = {}  # last result of each card, for the name of a card that fails later

    def ask(self, work: Callable[[], T]) -> T:
        """Run ``work`` in the thread for queries and return its result.

        Raises QueryError if the driver hangs.
        """
        try:
            return self.thread.ask(work, _START_S if self.session is None else _ANSWER_S)
        except LateError as late:
            query = "to start" if self.session is None else self.session.query
            raise QueryError(drivers.of_host().why_late(query, late.waited_s)) from None

    def take_here(self, processes: bool = False) -> Inventory:
        """Read all GPUs of the host."""
        try:
            gpus = self.with_session(lambda session: session.gpus(processes))
        except QueryError as problem:
            return Inventory((), self.driver_version, str(problem))
        reason = None if gpus else drivers.of_host().no_gpu
        return Inventory(
            tuple(map(self._named, gpus)), self.driver_version, reason, cuda_version=self._cuda_version
        )

    def with_session(self, work: Callable[[DriverSession], T]) -> T:
        """Run ``work`` with a session. Retry with a new session if other code has shut the library down."""
        while True:
            was_open = self.session is not None
            try:
                return work(self._started())
            except QueryError as problem:
                self.forget()
                if not (was_open and problem.ends_session):
                    raise

    def forget(self) -> None:
        """Shut the driver's library down."""
        session, self.session = self.session, None
        if session is not None:
            session.close()

    def _started(self) -> DriverSession:
        if self.session is None:
            self.session = drivers.of_host().start()
            self.driver_version = self.session.driver_version
            self._cuda_version = self.session.cuda_version
        return self.session

    def _named(self, gpu: GPU) -> GPU:
        """Return a GPU with its UUID and name, which a broken one may not report any more."""
        if gpu.mig_parent is None:
            if gpu.uuid:
                self._last[gpu.index] = gpu
            elif last := self._last.get(gpu.index):
                return replace(gpu, uuid=last.uuid, name=last.name)
        return gpu


# The GPUs as this process sees them. The key is the process id: a fork inherits the dict, but can use neither
# the session nor a lock held by another thread.
_hosts: dict[int, _HostGPUs] = {}


def _host() -> _HostGPUs:
    pid = os.getpid()
    host = _hosts.get(pid)
    if host is None:
        host = _hosts.setdefault(pid, _HostGPUs())  # atomic, so that all threads get the same session
        for other in set(_hosts) - {pid}:
            _hosts.pop(other, None)
    return host


def _before_fork() -> None:
    if (host := _hosts.get(os.getpid())) is not None:
        host.thread.before_fork()


def _after_fork_in_parent() -> None:
    if (host := _hosts.get(os.getpid())) is not None:
        host.thread.after_fork_in_parent()


# A fork can use neither the inherited session nor the thread for queries, which does not exist in the child.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent)
