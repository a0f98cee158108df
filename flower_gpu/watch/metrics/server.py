"""Answers requests for metrics over HTTP."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from flower_gpu.errors import ConfigError
from flower_gpu.watch.metrics.collector import Collector

_HIGHEST_PORT: Final = 65535
_NOTICE_S: Final = 0.5  # a run of less than this may be overlooked
_END_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


def serve(collector: Collector, address: str, port: int, on_ready: Callable[[str], None]) -> int:
    """Serve until signal n ends this process, and return 128 + n; ``on_ready`` gets the URL.

    Raises
    ------
    ConfigError
        If it cannot listen there.
    """
    with _blocked() as signals:
        bound = _listen(collector, address, port)
        host = f"[{address}]" if ":" in address else address
        on_ready(f"http://{host}:{bound}/metrics")
        # Not here: signals end this thread's wait at once, and would wait for a long trace to be read.
        threading.Thread(target=keep_up, args=(collector,), name="flower-gpu-runs", daemon=True).start()
        return 128 + signal.sigwait(signals)


def keep_up(collector: Collector, end: threading.Event | None = None) -> None:
    """Find runs as they come, also those that end before somebody asks; until an event is set, if ever."""
    end = end or threading.Event()
    collector.catch_up()
    while not end.wait(_NOTICE_S):
        collector.notice()


@contextmanager
def _blocked() -> Iterator[set[signal.Signals]]:
    """Block the signals that end this process, in threads that start meanwhile, too; those that it heeds."""
    heeded = {number for number in _END_SIGNALS if signal.getsignal(number) != signal.SIG_IGN}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, heeded)
    try:
        yield heeded
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _listen(collector: Collector, address: str, port: int) -> int:
    """Answer from now on, in threads that end with this process; return the port."""
    from prometheus_client import CollectorRegistry, start_http_server

    if not 0 <= port <= _HIGHEST_PORT:
        raise ConfigError(f"--port {port} is none: ports go from 1 to {_HIGHEST_PORT}, and 0 is a free one")
    registry = CollectorRegistry()  # of our own: the library's has metrics of this process in it
    registry.register(collector)
    try:
        server, _ = start_http_server(port, address, registry)
    except PermissionError:
        raise ConfigError(
            f"--port {port}: this account may not listen there; take one from 1024 on"
        ) from None
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"cannot listen on --address {address} --port {port}: {reason}. Take another, or --port 0"
        ) from None
    return int(server.server_port)
