"""How a call ended, for its caller: its value, what its task raised, or why there is neither."""

from __future__ import annotations

import io
import pickle
import signal
import sys
import traceback
from textwrap import indent
from typing import Any

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
from flower_gpu.workers import transport
from flower_gpu.workers.call import Call
from flower_gpu.workers.memory_files import sharing
from flower_gpu.workers.outcome import Outcome
from flower_gpu.workers.output import Tail
from flower_gpu.workers.transport import plain

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
    """Read what the worker of a call has left; WorkerError or InvalidResultError if that cannot be.

    ``request`` is -1 if the worker had it by itself.
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
    limit = control_group.memory_limit()
    if limit is None or limit.total_bytes > control_group.host_memory()[1]:
        return ""  # version 1 has a limit that nothing reaches
    return f"; its control group may have {limit.total_bytes >> 20} MiB"


def _quoted(tail: Tail) -> str:
    text = str(tail)
    if not text:
        return " It wrote nothing."
    return " The last lines it wrote:\n" + indent(text, "    ")
