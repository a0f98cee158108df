"""Reading log files of a run, also while they are written."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

_ANSI: Final = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_TRACEBACK: Final = re.compile(r"^Traceback \(most recent call last\):\n(?:[ \t].*\n|\n)*\S.*", re.MULTILINE)


class LineFollower:
    """Gives the lines that were added to a text file since the last time; the file may not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0
        self._torn = b""

    def read_new(self) -> list[str]:
        """Return complete new lines; a line without its end waits for the next time."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._position)
                new = file.read()
        except OSError:
            return []
        self._position += len(new)
        *lines, self._torn = (self._torn + new).split(b"\n")
        return [strip_colours(line.decode(errors="replace")).rstrip("\r") for line in lines]


def tail(path: Path, lines: int = 20) -> str:
    """Return the last lines of a text file that are not empty, without colours."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 64 * 1024))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    # Without the lines by which a traceback underlines its code: they leave no room for the rest.
    kept = [line.rstrip() for line in strip_colours(text).splitlines() if line.strip(" ^~")]
    return "\n".join(kept[-lines:])


def last_traceback(path: Path) -> str:
    """Return the last traceback in a log; empty where there is none."""
    try:
        found = _TRACEBACK.findall(path.read_text(errors="replace"))
    except OSError:
        return ""
    return found[-1] if found else ""


def strip_colours(text: str) -> str:
    """Remove the escape sequences of terminals."""
    return _ANSI.sub("", text)
