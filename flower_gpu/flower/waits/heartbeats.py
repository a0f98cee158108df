"""How often a SuperNode tells its SuperLink that it is there.

A SuperLink takes a SuperNode for dead when nothing came for two intervals; until then a round waits for its
reply. Flower's interval is 30 s. Each heartbeat costs the SuperLink as much as a question for a message.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any, Final

_INTERVAL: Final = "HEARTBEAT_DEFAULT_INTERVAL"  # as Flower calls it, in seconds
_SENDER: Final = "HeartbeatSender"
_LEAST_S: Final = 10  # that a SuperLink of Flower's takes
_IDLE_S: Final = 60


class Heartbeats:
    """The interval of this process's heartbeats: short while there is work, long while there is none.

    ``busy_s`` is the interval while there is work, if it is shorter than Flower's. ``sender`` and
    ``connection`` are Flower's modules: one sends heartbeats, the other tells the SuperLink how often they
    come. Where they lack what is changed here, it is another Flower, and it stays as it is.
    """

    def __init__(self, busy_s: float, sender: ModuleType, connection: ModuleType) -> None:
        self._modules = (sender, connection)
        self._pause = _Pause()
        self._is_busy = True
        self._can_change = False
        if all(hasattr(module, _INTERVAL) for module in self._modules):
            flowers_s: int = getattr(sender, _INTERVAL)
            self._busy_s = max(_LEAST_S, round(min(flowers_s, busy_s)))
            self._set(self._busy_s)
            if hasattr(connection, _SENDER):
                setattr(connection, _SENDER, self._made_by(getattr(connection, _SENDER)))

    def no_work(self) -> None:
        """From now on, send few."""
        if self._can_change and self._is_busy:
            self._is_busy = False
            self._set(_IDLE_S)

    def work(self) -> None:
        """From now on, send as many as before; the first at once: it tells the SuperLink the interval."""
        if not self._is_busy:
            self._is_busy = True
            self._set(self._busy_s)
            self._pause.end()

    def _made_by(self, make: Callable[..., Any]) -> Callable[..., Any]:
        """Return what makes a sender of Flower's whose waits can be cut short."""

        def made(*args: Any, **kwargs: Any) -> Any:
            sender = make(*args, **kwargs)
            if hasattr(sender, "_stop_event") and hasattr(sender, "_retry_invoker"):
                sender._stop_event = self._pause
                sender._retry_invoker.wait_function = self._pause.wait
                self._can_change = True
            return sender

        return made

    def _set(self, interval_s: int) -> None:
        for module in self._modules:
            setattr(module, _INTERVAL, interval_s)


class _Pause:
    """The ``Event`` by which Flower's sender is stopped, and between two heartbeats waits for that."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        with self._changed:
            self._is_set = True
            self._changed.notify_all()

    def wait(self, timeout: float) -> bool:
        with self._changed:
            if not self._is_set:
                self._changed.wait(timeout)
            return self._is_set

    def end(self) -> None:
        """End the wait of this moment."""
        with self._changed:
            self._changed.notify_all()
