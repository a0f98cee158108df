"""The end of a call, for its caller: a value, an exception, or the reason why there is no result."""

from __future__ import annotations

import io
import os
import pickle
import signal
import sys
import traceback
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from textwrap import indent
from types import TracebackType
from typing import Any, Final

from flower_gpu import control_group
from flower_gpu.errors import (
    LAST_LINES,
    MOST_CHARACTERS,
    ConfigError,
    FlowerGPUError,
    InvalidResultError,
    WorkerDiedError,
    WorkerError,
    WorkerTaskError,
    WorkerTimeoutError,
    shortened,
)
from flower_gpu.workers.call import Call
from flower_gpu.workers.call_watch import CallWatch
from flower_gpu.workers.output import Tail


@dataclass(frozen=True)
class Outcome:
    """The result of a task in a worker: a value or an error, never both."""

    value: Any = None  # value that the task returned
    cpu_s: float | None = None  # CPU seconds of the task in all threads of the process
    error_type: str | None = None  # ``module.Class`` of the exception
    error_text: str = ""  # ``str`` of the exception
    error_traceback: str = ""  # the formatted traceback
    # Pickled exception, or None if it cannot be passed on. It stays pickled, so that a caller does not import
    # libraries for it.
    error_pickle: bytes | None = None


def failure(error: BaseException) -> Outcome:
    """Return the outcome of a call that has raised an exception."""
    kind = type(error)
    is_long = len(_formatted(error)) > MOST_CHARACTERS
    # Texts are shortened first, because half of the limit is for the traceback lines in front of them.
    if is_long:
        _shorten(error)
    data = _pickled(error)
    # If the pickle is still too large, the caller gets only the name and the shortened text.
    if is_long and data is not None and len(data) > 2 * MOST_CHARACTERS:
        data = None
    return Outcome(
        error_type=f"{kind.__module__}.{kind.__qualname__}",
        error_text=shortened(_text(error)),
        error_traceback=shortened(_formatted(error)),
        error_pickle=data,
    )


_STANDARD_LIBRARY: Final = (f"{Path(os.__file__).parent}{os.sep}", "<frozen ")


def place_of(error: BaseException) -> str:
    """Return where an app raised an exception, as ``client_app.py, line 33``."""
    frames = traceback.extract_tb(_without_own_frames(error))
    libraries = {"site-packages", "dist-packages"}
    # The innermost frame may belong to a library: wandb replaces sys.exit with its own function, and argparse
    # calls sys.exit for its user. So the innermost frame of the app is wanted.
    app_frames = [
        frame
        for frame in frames
        if not libraries & {*Path(frame.filename).parts} and not frame.filename.startswith(_STANDARD_LIBRARY)
    ]
    innermost = (app_frames or frames)[-1]
    return f"{Path(innermost.filename).name}, line {innermost.lineno}"


def _formatted(error: BaseException) -> str:
    lines = traceback.format_exception(type(error), error, _without_own_frames(error))
    return "".join(lines).rstrip()


def _shorten(error: BaseException) -> None:
    """Shorten the texts of an exception and of its causes."""

    def cut(value: Any) -> Any:
        return shortened(value, MOST_CHARACTERS // 4) if type(value) is str else value

    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        current = pending.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        with suppress(Exception):  # the user's class may not allow the change
            current.args = tuple(map(cut, current.args))
        with suppress(Exception):
            current.__notes__ = list(map(cut, current.__notes__))
        pending += [current.__cause__, current.__context__, *getattr(current, "exceptions", ())]


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as broken:
        return f"(its text is not available: {type(broken).__name__} in __str__)"


def _without_own_frames(error: BaseException) -> TracebackType | None:
    frames = error.__traceback__
    own_folder = Path(__file__).parent
    while frames is not None and Path(frames.tb_frame.f_code.co_filename).parent == own_folder:
        frames = frames.tb_next
    return frames or error.__traceback__


def _pickled(error: BaseException) -> bytes | None:
    import cloudpickle

    if not isinstance(error, Exception):  # KeyboardInterrupt, for example, would stop the caller
        return None
    # As with results, classes are pickled by name if possible.
    for dumps in (pickle.dumps, cloudpickle.dumps):
        with suppress(Exception):
            data: bytes = dumps(error)
            # Try to rebuild it, because many exceptions can be pickled but not rebuilt.
            pickle.loads(data)
            return data
    return None


def unsendable(error: Exception) -> Outcome:
    """Return the outcome of a call whose value could not be written for its caller."""
    if isinstance(error, OSError | MemoryError):
        result: Exception = WorkerError(f"no room for the result: {type(error).__name__}: {_text(error)}")
    else:
        result = InvalidResultError(
            f"the task returned something that cannot be passed between processes "
            f"({type(error).__name__}: {_text(error)}). Return numpy arrays, numbers, strings, and lists or "
            "dicts of them"
        )
    return failure(result.with_traceback(error.__traceback__))


# Minimum seconds of imports that an error mentions. A shorter time does not explain a timeout.
_MENTIONED_S = 0.5


class WorkerStoppedError(WorkerError):
    """The worker was ended because its caller no longer wants its result."""


class WorkerTraceback(Exception):  # noqa: N818 - a cause, never raised by itself
    """The traceback of an exception in a worker, as the cause of the same exception in the caller."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f'\n"""\n{self.text}\n"""'


def unwrap(call: Call, outcome: Outcome) -> Any:
    """Return the task's value, or raise its exception, with the worker's traceback as the cause."""
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


#: Errors of a confined worker that are rebuilt in the caller from their name and text.
_OURS = (ConfigError, InvalidResultError)


class _WithoutImports(pickle.Unpickler):
    """An unpickler that rebuilds an exception without new imports in this process.

    If an exception needs other modules, the caller gets its name and text only. A client that holds only
    weights must not import torch for an error message.
    """

    def find_class(self, module: str, name: str) -> Any:
        if module not in sys.modules:
            raise pickle.UnpicklingError(f"{module} is not imported")
        # cloudpickle calls this function for modules that a function uses.
        if name == "subimport":
            return sys.modules.__getitem__
        return super().find_class(module, name)


def traceback_of(error: BaseException) -> str:
    """Return the traceback of an exception that a call has raised, or "" if the task did not raise it."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, WorkerTraceback):
            return seen.text
        seen = seen.__cause__
    if isinstance(error, FlowerGPUError):
        return ""
    try:
        return shortened("".join(traceback.format_exception(error)).rstrip())
    except Exception:  # the exception's __str__ failed
        return ""


def without_result(seen: CallWatch, timeout_s: float | None, after_s: float) -> WorkerError:
    """Return the error for a call without a result, because its worker exited or was ended before."""
    label, worker, wrote = seen.call.label, f"the worker (pid {seen.pid})", _quoted(seen.tail)
    if seen.is_stopped:
        ending = cannot_be_killed(seen.stuck_in) if seen.stuck_in else "was ended."
        return WorkerStoppedError(f"{label}: {worker} {ending}{wrote}")
    if seen.hangs and not seen.is_cancelled:
        assert timeout_s is not None
        # The worker may have gone on importing after the timeout, until it was killed.
        import_s = min(seen.import_s, timeout_s)
        imports = (
            f", of which at least {import_s:.1f} s went into imports" if import_s >= _MENTIONED_S else ""
        )
        end = f"{worker} and its children were ended. Raise timeout_s if it was only slow."
        if seen.stuck_in:
            end = f"{worker} {cannot_be_killed(seen.stuck_in)}"
        return WorkerTimeoutError(f"{label}: no result within timeout_s={timeout_s:g}{imports}; {end}{wrote}")
    if seen.stuck_in:
        ending = cannot_be_killed(seen.stuck_in)
        return WorkerDiedError(
            f"{label}: {worker} {ending}{wrote}", exitcode=-signal.SIGKILL, tail=str(seen.tail)
        )
    by = f" (sys.exit in {seen.sys_exit})" if seen.sys_exit and (seen.exitcode or 0) >= 0 else ""
    return WorkerDiedError(
        f"{label}: {worker} {_describe(seen)}{by} after {after_s:.1f} s, before it returned a result.{wrote}",
        exitcode=seen.exitcode or 0,
        tail=str(seen.tail),
        is_out_of_memory=seen.is_out_of_memory,
        peak_bytes=seen.peak_bytes,
    )


def cannot_be_killed(stuck_in: str) -> str:
    """Return the end of a sentence about a worker that has not exited after SIGKILL."""
    return (
        f"cannot be killed: after SIGKILL it is in {stuck_in}. It waits in the kernel for a GPU or a disk "
        "that does not answer (see dmesg). It keeps its lease until it is gone; other calls continue."
    )


def _describe(seen: CallWatch) -> str:
    exitcode = seen.exitcode
    if exitcode is None:
        return f"ended in an unknown way ({seen.why_unknown}),"
    if exitcode >= 0:
        return f"exited with code {exitcode}"
    try:
        name = signal.Signals(-exitcode).name
    except ValueError:
        name = "signal"
    text = f"was killed by {name} ({-exitcode})"
    if seen.is_out_of_memory:
        return (
            f"was killed by the kernel because main memory ran out (it had {_peak(seen)}{_memory_limit()}),"
        )
    if exitcode == -signal.SIGKILL:
        text += f" (by another process, or by the kernel for lack of memory: see dmesg{_memory_limit()})"
    return text


def _peak(seen: CallWatch) -> str:
    return f"up to {seen.peak_bytes >> 20} MiB" if seen.peak_bytes else "an unknown part"


def _memory_limit() -> str:
    limit = control_group.memory_limit()
    if limit is None or limit.total_bytes > control_group.host_memory()[1]:
        # Version 1 of control groups reports a limit above the host's memory if there is no limit.
        return ""
    return f"; its control group may have {limit.total_bytes >> 20} MiB"


def _quoted(tail: Tail) -> str:
    text = str(tail)
    if not text:
        return " It wrote nothing."
    return f"{LAST_LINES}\n{indent(text, '    ')}"
