"""Other processes of this host, as far as this account may look at them."""

from __future__ import annotations

import os
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass


@dataclass(frozen=True)
class OtherProcess:
    """A process; its variables are None where this account may not see them."""

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
        parser = ArgumentParser(add_help=False, allow_abbrev=False)
        parser.add_argument(name, dest="value", nargs="?", const="")
        value: str | None = parser.parse_known_args(self.command)[0].value
        return value


def others() -> Iterator[OtherProcess]:
    """Yield all processes but this one and those it comes from: their variables are ours."""
    import psutil

    own = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it has ended
            if process.pid not in own and (command := process.cmdline()):
                environ = None
                with suppress(psutil.AccessDenied):  # another account's
                    environ = process.environ()
                yield OtherProcess(process.pid, process.uids().real, tuple(command), environ)
