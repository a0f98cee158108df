"""The live view: looks, draws, waits, until it is told to end."""

from __future__ import annotations

import time
from typing import Final

from flower_gpu.watch.top.terminal import Terminal
from flower_gpu.watch.top.view import Frame
from flower_gpu.watch.top.watcher import Watcher

#: So long at a time a trace is read before keys are looked at again.
_READ_S: Final = 0.05


def run(watcher: Watcher, interval_s: float) -> int:
    """Show what happens, and return the exit status: 0 after ``q``, else 128 and the signal's number."""
    with Terminal() as terminal:
        keys = "q quits" if terminal.has_keys else "Ctrl-C quits"
        while not terminal.is_over:
            next_at = time.monotonic() + interval_s
            watcher.look_for_runs()
            is_all_read = watcher.read_on(_READ_S)
            frame = Frame(watcher.take(), keys)
            terminal.show(frame)
            while not terminal.is_over and (left_s := next_at - time.monotonic()) > 0:
                # A long trace is read on while there is nothing else to do.
                if terminal.wait(left_s if is_all_read else 0):
                    terminal.show(frame)  # its size may be another one
                elif not is_all_read:
                    is_all_read = watcher.read_on(min(_READ_S, left_s))
    return 0 if terminal.is_quit or terminal.ended_by is None else 128 + terminal.ended_by
