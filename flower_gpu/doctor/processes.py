"""Other processes of this host, as far as this account may look at them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")


@dataclass(frozen=True)
class OtherProcess:
    """A process.

    Parameters
    ----------
    pid : int
        Its number.
    user : int
        The account it runs as.
    command : tuple of str
        Its command line.
    environ : mapping of str to str, or None
        The variables that it was started with; None where this account may not see them.
    """

    pid: int
    user: int
    command: tuple[str, ...]
    environ: Mapping[str, str] | None

    def runs(self, program: str) -> bool:
        """Tell whether this is a Python command with that name, whatever its folder."""
        # The interpreter may have options of its own before the script's path.
        return any(argument.rpartition("/")[2] == program for argument in self.command[:4])

    def option(self, name: str) -> str | None:
        """Return the value of an option of the command line; ``""`` if it has none, None if it is missing."""
        for number, argument in enumerate(self.command):
            if argument == name:
                following = self.command[number + 1 : number + 2]
                return following[0] if following and not following[0].startswith("--") else ""
            if argument.startswith(f"{name}="):
                return argument.partition("=")[2]
        return None


def others() -> Iterator[OtherProcess]:
    """Yield all processes but this one and those it comes from: their variables are ours."""
    own = set(_ancestors(os.getpid()))
    with suppress(OSError):  # no /proc, as on macOS
        for folder in sorted(_PROC.glob("[0-9]*"), key=lambda folder: int(folder.name)):
            if int(folder.name) not in own and (process := _read(folder)) is not None:
                yield process


def _read(folder: Path) -> OtherProcess | None:
    try:
        user = folder.stat().st_uid
        command = _words((folder / "cmdline").read_bytes())
    except OSError:  # it has ended
        return None
    environ = None
    with suppress(OSError):  # another account's
        pairs = (word.partition("=") for word in _words((folder / "environ").read_bytes()))
        environ = {name: value for name, _, value in pairs}
    return OtherProcess(int(folder.name), user, command, environ) if command else None


def _words(data: bytes) -> tuple[str, ...]:
    return tuple(os.fsdecode(word) for word in data.rstrip(b"\0").split(b"\0")) if data else ()


def _ancestors(pid: int) -> Iterator[int]:
    while pid > 0:
        yield pid
        try:
            pid = int((_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            return
