"""Draws what a running worker reports: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from flower_gpu import trace

if TYPE_CHECKING:
    from tqdm import tqdm

_LINE_INTERVAL_S = 10.0  # between plain lines of one loop
_TRACE_INTERVAL_S = 0.5


class ProgressDisplay:
    """Shows the progress events of one call.

    ``label``: the call, for example ``"fit of client 3"``.
    ``record``: the call's fields in the trace; its ``pid`` is known once the worker runs.
    ``is_shown``: False: the trace gets them, and nothing is drawn.
    """

    def __init__(self, label: str, record: Mapping[str, Any], is_shown: bool = True) -> None:
        self._is_shown = is_shown
        self._label = label
        self._record = record
        self._bar: tqdm[Any] | None = None
        self._desc: str | None = None
        self._line_at = self._trace_at = float("-inf")

    def __enter__(self) -> ProgressDisplay:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def on_event(self, event: Mapping[str, Any]) -> None:
        """Take one event of the worker; anything but progress is not for this display."""
        if event.get("event") != "progress":
            return
        desc, done, total = event.get("desc", ""), event.get("n", 0), event.get("total")
        at_an_end = done == 0 or done == total
        now = time.monotonic()
        if at_an_end or now - self._trace_at >= _TRACE_INTERVAL_S:
            self._trace_at = now
            trace.write(
                "progress",
                call=self._record.get("call"),
                pid=self._record.get("pid"),
                client=self._record.get("client"),
                desc=desc,
                n=done,
                total=total,
            )
        if not self._is_shown:
            return
        with suppress(OSError, ValueError):  # stderr is closed or nobody reads it: no reason to end the call
            self._show(desc, done, total, now)

    def _show(self, desc: str, done: int, total: int | None, now: float) -> None:
        if sys.stderr is not None and sys.stderr.isatty():
            self._draw(desc, done, total)
        elif done == 0:
            self._line_at = now
        elif done == total or now - self._line_at >= _LINE_INTERVAL_S:
            self._line_at = now
            of = "" if total is None else f"/{total}"
            print(f"{self._label}: {desc} {done}{of}".rstrip(), file=sys.stderr, flush=True)

    def _draw(self, desc: str, done: int, total: int | None) -> None:
        if self._bar is None or desc != self._desc or done == 0:
            from tqdm import tqdm  # late: a client without a terminal never needs it

            self._close()
            self._desc = desc
            self._bar = tqdm(total=total, desc=f"{self._label} {desc}".strip(), leave=False)
        self._bar.update(done - self._bar.n)

    def _close(self) -> None:
        if self._bar is not None:
            with suppress(OSError, ValueError):
                self._bar.close()
            self._bar = None
