"""The live view: looks, draws, waits, until it is told to end."""

from __future__ import annotations

import signal
import time
from typing import Final

from flower_gpu.monitor.top import view
from flower_gpu.monitor.top.lines import Glyphs
from flower_gpu.monitor.top.terminal import Terminal
from flower_gpu.monitor.top.watcher import Watcher

#: So long at a time a trace is read before keys are looked at again.
_READ_S: Final = 0.05


def run(watcher: Watcher, interval_s: float, glyphs: Glyphs) -> int:
    """Show what happens, and return the exit status: 0 after ``q``, else 128 and the signal's number."""
    with Terminal() as terminal:
        keys = "q quits" if terminal.has_keys else "Ctrl-C quits"
        while not terminal.is_over:
            next_at = time.monotonic() + interval_s
            watcher.look_for_runs()
            is_read = watcher.read_on(_READ_S)
            snapshot = watcher.take()
            is_drawn = False
            while not terminal.is_over:
                if not is_drawn:
                    terminal.show(
                        lambda width, height, shown=snapshot: view.rendered(  # type: ignore[misc]
                            view.frame(shown, width, height, keys=keys, glyphs=glyphs)
                        )
                    )
                left_s = next_at - time.monotonic()
                if left_s <= 0:
                    break
                # A long trace is read on while there is nothing else to do.
                is_drawn = not terminal.wait(left_s if is_read else 0)
                is_read = is_read or watcher.read_on(min(_READ_S, left_s))
    if terminal.is_quit or terminal.ended_by is None:
        return 0
    return 128 + signal.Signals(terminal.ended_by).value
