"""The lines of clients that a run shows.

If a hundred clients print a line per epoch, a round has a thousand lines, and they hide the line of the
round. A file in the run's folder has all lines anyway. So a run shows the first lines of each round by
default.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from flower_gpu.simulation.options import LINES_PER_ROUND, ClientOutputWord


class ClientOutput:
    """Decides which lines of clients are shown, and counts the hidden lines. Thread-safe.

    ``word``: value of the option.
    ``on_first_hidden``: called when the first line is hidden, in the thread that read the line.
    ``hidden``: number of hidden lines.
    """

    def __init__(self, word: ClientOutputWord) -> None:
        self.word: Final = word
        self.on_first_hidden: Callable[[], None] = lambda: None
        self.hidden = 0
        self._shown = 0  # since the last start of a round
        self._lock = threading.Lock()

    def begin_round(self) -> None:
        """Begin a round. Its first lines are shown again."""
        with self._lock:
            self._shown = 0

    def admit(self, count: int) -> int:
        """Return the number of lines to show, out of ``count`` further lines."""
        with self._lock:
            room = {"all": count, "file": 0, "auto": LINES_PER_ROUND - self._shown}[self.word]
            admitted = min(count, room)
            self._shown += admitted
            is_first = admitted < count and not self.hidden
            self.hidden += count - admitted
        if is_first:
            self.on_first_hidden()
        return admitted
