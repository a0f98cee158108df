"""All exceptions of the package, and the functions that shorten their texts.

A message says what happened, with numbers, and what to do next.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

#: Begins the last lines of a worker in the error of its call.
LAST_LINES: Final = " The last lines it wrote:"
#: Longest text of other code that is kept, in characters: of an exception, a traceback, or a line of a log.
MOST_CHARACTERS: Final = 16_000


def shortened(text: str, max_count: int = MOST_CHARACTERS) -> str:
    """Return a text of about ``max_count`` characters: head and tail of a longer text, and a note between.

    An exception may quote a whole batch. Its text goes into the reply to the server, the trace, the logs and
    the summary. The note adds some dozens of characters to ``max_count``. The result can be encoded, see
    :func:`encodable`.
    """
    # A shortened text is a little longer than the limit, and must not be shortened again.
    if len(text) <= max_count + _NOTE_CHARACTERS:
        return encodable(text)
    half = max_count // 2
    left_out = len(text) - 2 * half
    return encodable(f"{text[:half]} [... {left_out:,} characters left out ...] {text[-half:]}")


def encodable(text: str) -> str:
    r"""Return a text with each lone surrogate replaced by its escape, such as ``\udcff``.

    Python represents file names that are not UTF-8 with such characters. They cannot be encoded, so protobuf,
    the libraries of trackers and files would refuse the whole text.
    """
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()


_NOTE_CHARACTERS: Final = 60


def text_of(error: BaseException | None) -> str:
    """Return the class of an exception, and its text shortened."""
    try:
        return shortened(f"{type(error).__name__}: {error}")
    except Exception:  # the __str__ of the exception failed
        return type(error).__name__


class FlowerGPUError(Exception):
    """Base class of all exceptions of this package."""


class ConfigError(FlowerGPUError, ValueError):
    """A setting, option or argument is invalid."""


class DiskError(FlowerGPUError):
    """A file that a run needs could not be written."""


class WorkerError(FlowerGPUError):
    """A call failed in its worker. Other calls are not affected: the next one gets a new worker."""


class WorkerStartError(WorkerError):
    """The worker could not be started, or could not load its task."""


class WorkerTaskError(WorkerError):
    """The task raised an exception that cannot be passed between processes.

    Attributes
    ----------
    error_type : str
        ``module.Class`` of the exception.
    """

    error_type = ""


class WorkerDiedError(WorkerError):
    """The worker ended without a result: killed, crashed, or left through ``os._exit``.

    Attributes
    ----------
    exitcode : int
        Exit status of the worker; ``-n`` when signal ``n`` ended it.
    tail : str
        The last lines of the worker's output.
    is_out_of_memory : bool
        True if the kernel certainly killed the worker because main memory ran out.
    peak_bytes : int
        Peak of the worker's main memory, or 0 if unknown.
    """

    def __init__(
        self,
        message: str,
        exitcode: int = 0,
        tail: str = "",
        *,
        is_out_of_memory: bool = False,
        peak_bytes: int = 0,
    ) -> None:
        super().__init__(message)
        self.exitcode = exitcode
        self.tail = tail
        self.is_out_of_memory = is_out_of_memory
        self.peak_bytes = peak_bytes


class RankError(WorkerError):
    """One of the ranks of a distributed function failed; the others were ended.

    Attributes
    ----------
    rank : int
        Number of the rank, from 0.
    """

    def __init__(self, message: str, rank: int = 0) -> None:
        super().__init__(message)
        self.rank = rank


class WorkerTimeoutError(WorkerError, TimeoutError):
    """The call took longer than its ``timeout_s``; the worker and its children were ended."""


class GPUError(FlowerGPUError):
    """No GPU, or no share of one, for a call that needs it."""


class GPUUnavailableError(GPUError):
    """The node requires a GPU that cannot be used, or a leased GPU does not answer or is refused."""


class LeaseError(GPUError):
    """No GPU of this host can ever grant the request, or the ledger cannot be used."""


class LeaseTimeoutError(GPUError, TimeoutError):
    """A call waited longer than its ``lease_timeout_s`` for a GPU, cores or main memory.

    The message names who holds it.
    """


class GPUOutOfMemoryError(WorkerError, GPUError):
    """A call ran out of GPU memory, also when it was tried again. The message has the numbers."""


class ClientCallError(FlowerGPUError):
    """A function of a ``ClientApp`` raised an exception, which is the cause. The message names the client."""


class RunEndedError(FlowerGPUError):
    """A simulated run was ended because its result would be invalid. The message has the reason.

    Attributes
    ----------
    folder : Path or None
        Folder with the results of the run.
    can_resume : bool
        True if a checkpoint exists, so that the run can be resumed.
    """

    def __init__(self, message: str, folder: Path | None = None, can_resume: bool = False) -> None:
        super().__init__(message)
        self.folder = folder
        self.can_resume = can_resume


class ClientsFailedError(RunEndedError):
    """Every client failed in the first round, in three rounds in a row, or in all rounds together."""


class NotDeterministicError(RunEndedError):
    """A deterministic run would not give the same model again, because of an event in the message."""


class InvalidResultError(FlowerGPUError, ValueError):
    """A task returned a value that Flower cannot use. The message names the entry."""


class WeightsError(FlowerGPUError, ValueError):
    """The weights do not fit the model. The message names the entry."""
