"""Reading files while others still write them."""

from __future__ import annotations

from pathlib import Path

from flower_gpu.launch.service import strip_colours


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
