"""The live view: looks, draws, waits, until it is told to end."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Final

from flower_gpu.monitor.top import view
from flower_gpu.monitor.top.lines import Glyphs
from flower_gpu.monitor.top.snapshot import Snapshot
from flower_gpu.monitor.top.terminal import Terminal
from flower_gpu.monitor.top.watcher import Watcher

if TYPE_CHECKING:
    from rich.console import RenderableType

#: So long at a time a trace is read before keys are looked at again.
_READ_S: Final = 0.05


def run(watcher: Watcher, interval_s: float, glyphs: Glyphs) -> int:
    """Show what happens, and return the exit status: 0 after ``q``, else 128 and the signal's number."""
    with Terminal() as terminal:
        keys = "q quits" if terminal.has_keys else "Ctrl-C quits"
        while not terminal.is_over:
            next_at = time.monotonic() + interval_s
            watcher.look_for_runs()
            is_all_read = watcher.read_on(_READ_S)
            draw = partial(_drawn, watcher.take(), keys, glyphs)
            terminal.show(draw)
            while not terminal.is_over and (left_s := next_at - time.monotonic()) > 0:
                # A long trace is read on while there is nothing else to do.
                if terminal.wait(left_s if is_all_read else 0):
                    terminal.show(draw)  # its size may be another one
                elif not is_all_read:
                    is_all_read = watcher.read_on(min(_READ_S, left_s))
    return 0 if terminal.is_quit or terminal.ended_by is None else 128 + terminal.ended_by


def _drawn(snapshot: Snapshot, keys: str, glyphs: Glyphs, width: int, height: int) -> RenderableType:
    return view.rendered(view.frame(snapshot, width, height, keys=keys, glyphs=glyphs))
