"""One process that the launcher starts and watches."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from flower_gpu.launch.processes import describe_exit

#: How servers say that somebody else has their port: uvicorn, then flwr.
_PORT_TAKEN: Final = re.compile(r"address already in use|Port in server address \S+ is already in use")
_ANSI: Final = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


class Service:
    """A process with a log file, which dies when the launcher does.

    Parameters
    ----------
    name : str
        For messages.
    command : sequence of str
        Program and arguments.
    env : mapping
        Its whole environment.
    log : Path
        Where its output goes.
    output : Path, optional
        Where its standard output goes instead, if that is data.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        env: Mapping[str, str],
        log: Path,
        output: Path | None = None,
    ) -> None:
        self.name = name
        self.command = tuple(command)
        self.log = log
        self._env = dict(env)
        self._output = output
        self._process: subprocess.Popen[bytes] | None = None
        self._life: int | None = None

    def start(self) -> None:
        """Start the process in a process group of its own, out of reach of a terminal's Ctrl-C."""
        with contextlib.ExitStack() as stack:
            log = stack.enter_context(self.log.open("ab"))
            log.write(f"$ {shlex.join(self.command)}\n".encode())
            log.flush()
            out = stack.enter_context(self._output.open("wb")) if self._output else log
            read, self._life = os.pipe()  # both are closed in programs we start, unless passed on
            stack.callback(os.close, read)
            try:
                self._process = subprocess.Popen(
                    self.command,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=log,
                    env=self._env,
                    process_group=0,
                    pass_fds=(read,),
                )
            except BaseException:
                self._close_life()
                raise
            _kill_group_at_end_of(read, self._process.pid)

    @property
    def pid(self) -> int | None:
        """Pid of the process, None before its start."""
        return None if self._process is None else self._process.pid

    @property
    def returncode(self) -> int | None:
        """How the process ended; None while it runs or before it was started."""
        if self._process is None:
            return None
        code = self._process.poll()
        if code is not None:
            self._close_life()
        return code

    @property
    def runs(self) -> bool:
        """Whether the process was started and has not ended."""
        return self._process is not None and self.returncode is None

    @property
    def port_was_taken(self) -> bool:
        """Whether the process ended because somebody else listens on its port."""
        return bool(self.returncode) and _PORT_TAKEN.search(self.tail(60)) is not None

    def terminate(self) -> None:
        """Ask the process to end."""
        if self.runs and self._process is not None:
            self._process.send_signal(signal.SIGTERM)

    def tail(self, lines: int = 20) -> str:
        """Last lines of its log, without colours."""
        return tail(self.log, lines)

    def describe_end(self) -> str:
        """Say which process ended and how."""
        code = self.returncode
        return f"{self.name} ended with {'nothing' if code is None else describe_exit(code)}"

    def _close_life(self) -> None:
        if self._life is not None:
            os.close(self._life)
            self._life = None


def _kill_group_at_end_of(read: int, group: int) -> None:
    """Let the kernel kill a process group when the other end of a pipe is gone.

    That end is open in this process only, so it goes when this process does, whatever ended it; nobody has to
    run any code for it. The settings belong to the open file, which the group's first process has inherited.
    """
    if sys.platform != "linux":
        return
    fcntl.fcntl(read, fcntl.F_SETOWN, -group)
    fcntl.fcntl(read, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(read, fcntl.F_SETFL, fcntl.fcntl(read, fcntl.F_GETFL) | os.O_ASYNC)


def tail(path: Path, lines: int = 20) -> str:
    """Last lines of a text file that say something, without colours."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 64 * 1024))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    # Without the lines by which a traceback underlines its code: they leave no room for the rest.
    kept = [line.rstrip() for line in strip_colours(text).splitlines() if line.strip(" ^~")]
    return "\n".join(kept[-lines:])


def strip_colours(text: str) -> str:
    """Remove the escape sequences of terminals."""
    return _ANSI.sub("", text)
