"""Every exception of the package, and how much of a text is kept.

A message says what happened, with the numbers, and what to do next.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

#: So many characters of a text that others have written (exception, traceback, line of a log) are kept.
MOST_CHARACTERS: Final = 16_000


def shortened(text: str, most: int = MOST_CHARACTERS) -> str:
    """Return a text as it is kept: of a long one the head and the tail, and how much is left out.

    An exception may quote a whole batch. Its text goes into the reply to the server, the trace, the logs and
    the summary: each of them keeps what this function returns, some dozens of characters more than ``most``.
    The result can be encoded: see :func:`encodable`.
    """
    # A text that is cut already is a little longer than the limit. It is not cut again.
    if len(text) <= most + _NOTE_CHARACTERS:
        return encodable(text)
    half = most // 2
    left_out = len(text) - 2 * half
    return encodable(f"{text[:half]} [... {left_out:,} characters left out ...] {text[-half:]}")


def encodable(text: str) -> str:
    r"""Return a text with each lone surrogate as its escape, such as ``\udcff``.

    Python reads a file name that is not UTF-8 with such characters. No encoding has them, so protobuf, the
    libraries of trackers and files refuse the whole text.
    """
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()


_NOTE_CHARACTERS: Final = 60


def text_of(error: BaseException | None) -> str:
    """Return the class of an exception, and its text shortened."""
    try:
        return shortened(f"{type(error).__name__}: {error}")
    except Exception:  # its own __str__ failed
        return type(error).__name__


class FlowerGPUError(Exception):
    """Base of everything this package raises on its own."""


class ConfigError(FlowerGPUError, ValueError):
    """A setting, option or argument that cannot be used."""


class DiskError(FlowerGPUError):
    """What a run has to keep could not be written."""


class WorkerError(FlowerGPUError):
    """A call failed in its worker. Only this call: the next one gets a new worker."""


class WorkerStartError(WorkerError):
    """The worker could not be started, or could not load the task it was given."""


class WorkerTaskError(WorkerError):
    """The task raised an exception that cannot be passed between processes.

    Attributes
    ----------
    error_type : str
        ``module.Class`` of it.
    """

    error_type = ""


class WorkerDiedError(WorkerError):
    """The worker ended without a result: killed, crashed, or left through ``os._exit``.

    Attributes
    ----------
    exitcode : int
        Exit status of the worker; ``-n`` when signal ``n`` ended it.
    tail : str
        The last lines the worker wrote.
    is_out_of_memory : bool
        Whether the kernel killed the worker because main memory ran out. False where that is not certain.
    peak_bytes : int
        The most main memory that the worker had; 0 where that is not known.
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
        The rank, from 0 on.
    """

    def __init__(self, message: str, rank: int = 0) -> None:
        super().__init__(message)
        self.rank = rank


class WorkerTimeoutError(WorkerError, TimeoutError):
    """The call took longer than its ``timeout_s``; the worker and its children were ended."""


class GPUError(FlowerGPUError):
    """No GPU, or no share of one, for a call that needs it."""


class GPUUnavailableError(GPUError):
    """The node requires a GPU that cannot be used, or a leased one answers no more or is refused."""


class LeaseError(GPUError):
    """A share that no GPU of this host can ever give, or a ledger that cannot be used."""


class LeaseTimeoutError(GPUError, TimeoutError):
    """A call waited longer than its ``lease_timeout_s`` for a GPU, cores or main memory.

    The message names who holds it.
    """


class GPUOutOfMemoryError(WorkerError, GPUError):
    """A call ran out of GPU memory, also in further tries; the message has the numbers."""


class ClientCallError(FlowerGPUError):
    """A function of a ``ClientApp`` raised an exception, which is the cause; the message names the client."""


class RunEndedError(FlowerGPUError):
    """A simulated run was ended because it could not give a valid result; the message has the reason.

    Attributes
    ----------
    folder : Path or None
        Where the run's results are.
    can_resume : bool
        Whether there is a checkpoint to go on from, once the reason is gone.
    """

    def __init__(self, message: str, folder: Path | None = None, can_resume: bool = False) -> None:
        super().__init__(message)
        self.folder = folder
        self.can_resume = can_resume


class ClientsFailedError(RunEndedError):
    """Every client failed in the first round, in three rounds in a row, or in all rounds together."""


class NotDeterministicError(RunEndedError):
    """In a deterministic run something happened that would give another model the next time."""


class InvalidResultError(FlowerGPUError, ValueError):
    """A task returned something Flower cannot use; the message names the entry."""


class WeightsError(FlowerGPUError, ValueError):
    """Weights that do not fit a model; the message names the entry."""
