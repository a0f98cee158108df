"""The lines of clients that a run shows.

A hundred clients that print a line for each epoch write a thousand lines in a round, and the line of the
round is lost among them. All lines are in a file of the run's folder anyway. So a run shows the first lines
of each round, unless the user asks for all.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from flower_gpu.simulation.options import LINES_PER_ROUND, ClientOutputWord


class ClientOutput:
    """Admits lines of clients to the stream of the run, and counts those that it hides.

    ``word``: the option's value.
    ``on_first_hidden``: called when the first line is hidden, in the thread that has read it.
    ``hidden``: number of lines that were not shown.
    """

    def __init__(self, word: ClientOutputWord) -> None:
        self.word: Final = word
        self.on_first_hidden: Callable[[], None] = lambda: None
        self.hidden = 0
        self._shown = 0  # since the last start of a round
        self._lock = threading.Lock()

    def begin_round(self) -> None:
        """Show as many lines again as at the start of the run."""
        with self._lock:
            self._shown = 0

    def admit(self, count: int) -> int:
        """Return how many of ``count`` further lines are shown."""
        with self._lock:
            room = {"all": count, "file": 0, "auto": LINES_PER_ROUND - self._shown}[self.word]
            admitted = min(count, room)
            self._shown += admitted
            is_first = admitted < count and not self.hidden
            self.hidden += count - admitted
        if is_first:
            self.on_first_hidden()
        return admitted
