"""What became of a call, on the caller's side: what its worker wrote, and its value or its error."""

from __future__ import annotations

import codecs
import io
import os
import pickle
import signal
import stat
import sys
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import dropwhile, takewhile
from textwrap import indent
from typing import Any, TextIO

from flower_gpu import control_group
from flower_gpu.errors import (
    ConfigError,
    FlowerGPUError,
    InvalidResultError,
    WorkerDiedError,
    WorkerError,
    WorkerTaskError,
    WorkerTimeoutError,
    shortened,
)
from flower_gpu.options import RUN_DIR_VARIABLE
from flower_gpu.workers import transport
from flower_gpu.workers.call import Call
from flower_gpu.workers.memory_files import sharing
from flower_gpu.workers.outcome import Outcome
from flower_gpu.workers.transport import plain

_CHUNK = 65536
_MAX_PIPE = 1 << 20  # bytes a pipe holds at most, /proc/sys/fs/pipe-max-size
_REMEMBERED_LINES = 1000
#: Bytes of one stream of one call that a file is given.
MOST_IN_A_FILE = 16 << 20
#: What clients of a simulation write, in the run's folder.
LOG_NAME = "clients.log"
_CUT = f"\n[flower-gpu: more than {MOST_IN_A_FILE >> 20} MiB; the rest of this call is not here]\n"
_TAIL_LINES = 30  # of them in a message
_TAIL_COLUMNS = 500
_STACK_LINES = 15
_STACK_HEADING = "(most recent call first):"  # faulthandler's


class Stream:
    """A pipe from the worker, read in whole chunks without blocking."""

    def __init__(self, descriptor: int, on_data: Callable[[bytes], None]) -> None:
        os.set_blocking(descriptor, False)
        self.descriptor = descriptor
        self._on_data = on_data

    def read(self) -> bool:
        """Take one chunk; return False at the end of the stream."""
        try:
            data = os.read(self.descriptor, _CHUNK)
        except BlockingIOError:
            return True
        if data:
            self._on_data(data)
        return bool(data)

    def drain(self) -> None:
        """Take what has been written so far, and no more: a process that got away may go on writing."""
        with suppress(BlockingIOError):
            for _ in range(_MAX_PIPE // _CHUNK):
                data = os.read(self.descriptor, _CHUNK)
                if not data:
                    break
                self._on_data(data)
        self._on_data(b"")


class LineCutter:
    """Cuts bytes into lines; an empty chunk flushes an unfinished one."""

    def __init__(self, on_line: Callable[[str], None], max_unfinished: int | None = None) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._unfinished = ""
        self._on_line = on_line
        self._max_unfinished = max_unfinished

    def __call__(self, data: bytes) -> None:
        """Take the next bytes."""
        *lines, rest = (self._unfinished + self._decoder.decode(data)).split("\n")
        if not data and rest:
            lines, rest = [*lines, rest], ""
        self._unfinished = rest if self._max_unfinished is None else rest[-self._max_unfinished :]
        for line in lines:
            self._on_line(line)


class Tail:
    """The last lines of a worker's output, for messages."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=_REMEMBERED_LINES)

    def reader(self) -> LineCutter:
        """Return what remembers the lines of one stream; the streams share the tail."""
        return LineCutter(self._remember, max_unfinished=_CHUNK)

    def __str__(self) -> str:
        lines = list(self._lines)
        headings = [n for n, line in enumerate(lines) if line.endswith(_STACK_HEADING)]
        if not headings:
            return "\n".join(lines[-_TAIL_LINES:])
        # The stacks of all threads may be hundreds of lines, innermost calls first: show what the thread
        # that crashed is at, or the main thread, which is the last, and some lines from before and after.
        current = next((n for n in headings if lines[n].startswith("Current thread")), headings[-1])
        stack = list(takewhile(_is_frame, lines[current + 1 :]))
        after = list(dropwhile(_is_frame, lines[headings[-1] + 1 :]))
        few = _TAIL_LINES // 3
        shown = [*lines[: headings[0]][-few:], lines[current], *stack[:_STACK_LINES], *after[-few:]]
        return "\n".join(shown)

    def _remember(self, line: str) -> None:
        shown = line.rstrip("\r").rpartition("\r")[2]  # a bar draws over itself
        self._lines.append(shown[-_TAIL_COLUMNS:])


def _is_frame(line: str) -> bool:
    return line.startswith("  ")


def output_of(call: Call, target: TextIO | None, tail: Tail) -> Callable[[bytes], None]:
    """Return what takes one stream of the output of a call's worker."""
    return _echo_named(target, tail, call.log_prefix) if call.names_output else echo(target, tail)


def _echo_named(target: TextIO | None, tail: Tail, name: str) -> Callable[[bytes], None]:
    """Pass a worker's output on in whole lines, each with a name in front, and into the run's folder.

    Log lines have the name already. Of a line that draws over itself, as a bar does, its last state is taken.
    """
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    remember = tail.reader()
    folder = os.environ.get(RUN_DIR_VARIABLE)
    is_file = _is_file(target)
    begun, left = "", MOST_IN_A_FILE

    def on_data(data: bytes) -> None:
        nonlocal begun, left
        remember(data)
        *lines, begun = (begun + decoder.decode(data)).split("\n")
        begun = begun[:-1].rpartition("\r")[2] + begun[-1:]
        if begun and (not data or len(begun) > _CHUNK):  # of the last line, or of one without an end
            lines, begun = [*lines, begun], ""
        shown = (line.rstrip("\r").rpartition("\r")[2] for line in lines)
        text = "".join(f"{line}\n" if name in line else f"{name}{line}\n" for line in shown)
        if not text:
            return
        kept = text[:left] + _CUT * (0 < left < len(text))
        left = max(0, left - len(text))
        _write(target, kept if is_file else text)
        if folder and kept:
            with suppress(OSError), open(os.path.join(folder, LOG_NAME), "ab", buffering=0) as file:  # noqa: PTH118
                file.write(kept.encode(errors="backslashreplace"))

    return on_data


def echo(target: TextIO | None, tail: Tail) -> Callable[[bytes], None]:
    """Pass a worker's output on to the caller's stream, and remember the last lines of it.

    A file, such as the log of a run, gets :data:`MOST_IN_A_FILE` bytes of one stream of a call: a loop that
    prints without end would fill the disk. A terminal or a pipe gets all.
    """
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    remember = tail.reader()
    left = MOST_IN_A_FILE if _is_file(target) else None

    def on_data(data: bytes) -> None:
        nonlocal left
        remember(data)
        if left is not None:
            if left == 0:
                return
            left, data = max(0, left - len(data)), data[:left]
        text = decoder.decode(data)
        _write(target, text + _CUT * (left == 0))

    return on_data


def _write(target: TextIO | None, text: str) -> None:
    if target is not None and text:
        with suppress(OSError, ValueError, LookupError):  # closed, or of no known encoding
            target.write(_writable(text, target))
            target.flush()


def _is_file(target: TextIO | None) -> bool:
    try:
        return target is not None and stat.S_ISREG(os.fstat(target.fileno()).st_mode)
    except (OSError, ValueError, AttributeError):  # a notebook's, or closed
        return False


def _writable(text: str, target: TextIO) -> str:
    encoding = getattr(target, "encoding", None) or "utf-8"
    return text.encode(encoding, errors="backslashreplace").decode(encoding)


_TOLD_S = 0.5  # of imports; less explains nothing


class WorkerStoppedError(WorkerError):
    """The worker was ended because its caller wants no result of it any more."""


class WorkerTraceback(Exception):  # noqa: N818 - a cause, never raised by itself
    """The traceback of an exception in a worker, as the cause of the same exception in the caller."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f'\n"""\n{self.text}\n"""'


def read(call: Call, reply: int, request: int) -> Outcome:
    """Read what the worker of a call has left.

    ``reply, request``: the memory files of the call; the request is -1 if the worker had it by itself.
    Raises WorkerError, or InvalidResultError, if that cannot be.
    """
    if call.confinement is not None:
        if request >= 0:
            sharing.finished(request)
        return plain.read_reply(reply)
    try:
        outcome: Outcome = transport.read_reply(reply, request)
    except WorkerError:
        raise
    except Exception as error:
        raise InvalidResultError(
            f"{call.label} returned something that this process cannot rebuild "
            f"({type(error).__name__}: {error}). Return numpy arrays, numbers, strings, and lists or "
            "dicts of them"
        ) from error
    return outcome


def unwrap(call: Call, outcome: Outcome) -> Any:
    """Return what the task returned, or raise what it raised, with the worker's traceback as the cause."""
    if outcome.error_type is None:
        return outcome.value
    cause = WorkerTraceback(outcome.error_traceback)
    if outcome.error_pickle is not None:
        try:
            error = _WithoutImports(io.BytesIO(outcome.error_pickle)).load()
        except Exception:
            error = None
        if isinstance(error, Exception):
            raise error from cause
    for kind in _OURS if call.confinement is not None else ():
        if outcome.error_type == f"{kind.__module__}.{kind.__qualname__}":
            raise kind(outcome.error_text) from cause
    name = outcome.error_type.removeprefix("builtins.")
    failed = WorkerTaskError(f"{call.label} raised {name}: {outcome.error_text}")
    failed.error_type = outcome.error_type
    raise failed from cause


#: What a confined worker's error becomes again, by its name and text.
_OURS = (ConfigError, InvalidResultError)


class _WithoutImports(pickle.Unpickler):
    """Rebuilds an exception from what this process has imported anyway.

    What needs more stays a name and a text: a client that holds only weights must not import torch for
    an error message.
    """

    def find_class(self, module: str, name: str) -> Any:
        if module not in sys.modules:
            raise pickle.UnpicklingError(f"{module} is not imported")
        if name == "subimport":  # cloudpickle's, for the modules that a function uses
            return sys.modules.__getitem__
        return super().find_class(module, name)


def traceback_of(error: BaseException) -> str:
    """Return the traceback of an exception that a call has raised, as far as it is of the task's own code."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, WorkerTraceback):
            return seen.text
        seen = seen.__cause__
    if isinstance(error, FlowerGPUError):
        return ""
    try:
        return shortened("".join(traceback.format_exception(error)).rstrip())
    except Exception:  # its own __str__ failed
        return ""


def timed_out(call: Call, pid: int, timeout_s: float, import_s: float, tail: Tail) -> WorkerTimeoutError:
    """Return the error for a call that took too long, of which it has spent so much on imports."""
    import_s = min(import_s, timeout_s)  # it may have gone on while it wrote where it was
    imports = f", of which at least {import_s:.1f} s went into imports" if import_s >= _TOLD_S else ""
    return WorkerTimeoutError(
        f"{call.label}: no result within timeout_s={timeout_s:g}{imports}; the worker (pid {pid}) and "
        f"its children were ended. Raise timeout_s if it was only slow.{_quoted(tail)}"
    )


def stopped(call: Call, pid: int, tail: Tail) -> WorkerStoppedError:
    """Return the error for a worker that was ended before it had a result."""
    return WorkerStoppedError(f"{call.label}: the worker (pid {pid}) was ended.{_quoted(tail)}")


def died(
    call: Call, pid: int, exitcode: int | None, sys_exit: str, after_s: float, tail: Tail
) -> WorkerDiedError:
    """Return the error for a worker that ended without a result.

    ``exitcode`` is ``-n`` for signal ``n``. ``sys_exit`` says where the task has called that, if it has.
    """
    by = f" (sys.exit in {sys_exit})" if sys_exit and (exitcode is None or exitcode >= 0) else ""
    return WorkerDiedError(
        f"{call.label}: the worker (pid {pid}) {_describe(exitcode)}{by} after "
        f"{after_s:.1f} s, before it returned a result.{_quoted(tail)}",
        exitcode=exitcode or 0,
        tail=str(tail),
    )


def _describe(exitcode: int | None) -> str:
    if exitcode is None:
        return "ended, how is not known (SIGCHLD is ignored here, or something else waits for all children),"
    if exitcode >= 0:
        return f"exited with code {exitcode}"
    try:
        name = signal.Signals(-exitcode).name
    except ValueError:
        name = "signal"
    text = f"was killed by {name} ({-exitcode})"
    if exitcode == -signal.SIGKILL:
        text += f" (by somebody, or by the kernel for want of memory: see dmesg{_memory_limit()})"
    return text


def _memory_limit() -> str:
    limited = control_group.available_memory()
    if limited is None or limited[1] > control_group.host_memory()[1]:
        return ""  # version 1 has a limit that nothing reaches
    return f"; its control group may have {limited[1] >> 20} MiB"


def _quoted(tail: Tail) -> str:
    text = str(tail)
    if not text:
        return " It wrote nothing."
    return " The last lines it wrote:\n" + indent(text, "    ")
