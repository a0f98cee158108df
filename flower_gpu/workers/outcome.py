"""What a worker found out for its call: a value, or an exception in a form that its caller can take.

The worker imports this before the environment of its call is set, so only light modules are imported here.
"""

from __future__ import annotations

import pickle
import traceback
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from flower_gpu.errors import MOST_CHARACTERS, InvalidResultError, WorkerError, shortened


@dataclass(frozen=True)
class Outcome:
    """What a worker found out: a value or an error, never both."""

    value: Any = None  # what the task returned
    cpu_s: float | None = None  # what the CPUs took for that, in all threads of the process
    error_type: str | None = None  # ``module.Class`` of the exception
    error_text: str = ""  # ``str`` of the exception
    error_traceback: str = ""  # the formatted traceback
    # The exception itself, where it can be passed on. Kept as bytes, so that a caller without the libraries
    # it needs does not import them.
    error_pickle: bytes | None = None


def failure(error: BaseException) -> Outcome:
    """Return the outcome of a call that has raised an exception."""
    kind = type(error)
    is_long = len(_formatted(error)) > MOST_CHARACTERS
    if is_long:  # the texts first: half of the limit is for the lines of the traceback before them
        _shorten(error)
    data = _pickled(error)
    if is_long and data is not None and len(data) > 2 * MOST_CHARACTERS:
        data = None  # its text is longer than what it was made of
    return Outcome(
        error_type=f"{kind.__module__}.{kind.__qualname__}",
        error_text=shortened(_text(error)),
        error_traceback=shortened(_formatted(error)),
        error_pickle=data,
    )


def place_of(error: BaseException) -> str:
    """Return where an app raised an exception, as ``client_app.py, line 33``."""
    frames = traceback.extract_tb(_without_own_frames(error))
    libraries = {"site-packages", "dist-packages"}
    own = [frame for frame in frames if not libraries & {*Path(frame.filename).parts}]
    where = (own or frames)[-1]  # wandb has put a sys.exit of its own in the place of Python's
    return f"{Path(where.filename).name}, line {where.lineno}"


def _formatted(error: BaseException) -> str:
    lines = traceback.format_exception(type(error), error, _without_own_frames(error))
    return "".join(lines).rstrip()


def _shorten(error: BaseException) -> None:
    """Cut the texts that an exception was made of, and those of the exceptions that led to it."""

    def cut(value: Any) -> Any:
        return shortened(value, MOST_CHARACTERS // 4) if type(value) is str else value

    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        with suppress(Exception):  # a class of its own may allow no change
            one.args = tuple(map(cut, one.args))
        with suppress(Exception):
            one.__notes__ = list(map(cut, one.__notes__))
        waiting += [one.__cause__, one.__context__, *getattr(one, "exceptions", ())]


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as broken:
        return f"(its text cannot be had: {type(broken).__name__} in __str__)"


def _without_own_frames(error: BaseException) -> TracebackType | None:
    frames = error.__traceback__
    own = Path(__file__).parent
    while frames is not None and Path(frames.tb_frame.f_code.co_filename).parent == own:
        frames = frames.tb_next
    return frames or error.__traceback__


def _pickled(error: BaseException) -> bytes | None:
    import cloudpickle

    if not isinstance(error, Exception):  # KeyboardInterrupt would stop the caller
        return None
    for dumps in (pickle.dumps, cloudpickle.dumps):  # by name where possible, as a result
        with suppress(Exception):
            data: bytes = dumps(error)
            pickle.loads(data)  # many exceptions can be pickled but not built again
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
