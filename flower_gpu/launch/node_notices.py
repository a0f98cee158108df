"""What SuperNodes write into their logs and their user should know: said on the terminal, each thing once."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Final

from flower_gpu import trace
from flower_gpu.launch.supervisor import new_lines
from flower_gpu.printable import path_text, printable

# Flower's levels of lines, and what it writes once the SuperLink has let it in.
_LINE: Final = re.compile(r"(WARNING|ERROR)\s*:\s+(\S.*)")
_IS_IN: Final = "SuperNode ID:"
_ENDS: Final = "Exit Code:"  # its end is said anyway
_NUMBERS: Final = re.compile(r"\d+")


class Notices:
    """What is said of so many SuperNodes: errors, and where they are wanted warnings, too."""

    def __init__(self, count: int, say: Callable[[str], object], with_warnings: bool = True) -> None:
        self._count = count
        self._say = say
        self._with_warnings = with_warnings
        self._said: set[str] = set()
        self._in: set[str] = set()
        self._turned_away: set[str] = set()

    def turned_away(self, node: str, text: str) -> None:
        """Say that the SuperLink does not let a SuperNode in; once until it does."""
        if node not in self._turned_away:
            self._turned_away.add(node)
            self._say(f"{node} is not let in{text}")

    def look(self, node: str, log: trace.Follower, path: Path) -> None:
        """Read what was added to the log of a SuperNode."""
        for line in new_lines(log):
            if _IS_IN in line:
                self._let_in(node)
            elif found := _LINE.match(line):
                self._note(node, found[1], found[2], path)

    def _let_in(self, node: str) -> None:
        if node in self._turned_away:
            self._turned_away.remove(node)
            self._say(f"{node} is let in")
        if len(self._in) < self._count:
            self._in.add(node)
            if len(self._in) == self._count:
                self._say(f"connected: {self._count} of {self._count} SuperNodes")

    def _note(self, node: str, level: str, text: str, path: Path) -> None:
        kind = _NUMBERS.sub("#", text)
        is_wanted = (level == "ERROR" or self._with_warnings) and not text.startswith(_ENDS)
        if is_wanted and kind not in self._said:
            self._said.add(kind)
            self._say(f"{node}: {printable(text)} (in {path_text(path)})")
