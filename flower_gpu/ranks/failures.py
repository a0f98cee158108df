"""Which of several ranks failed, when the failure of one makes the others fail as well."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from flower_gpu.errors import RankError, WorkerDiedError, WorkerTaskError, WorkerTimeoutError, text_of
from flower_gpu.workers.outcomes import WorkerStoppedError

# NCCL's watchdog ends a process whose partner does not answer, and says so in its output.
_WATCHDOG: Final = re.compile(
    r"Watchdog caught collective|taking the entire process down|WorkNCCL::checkTimeout"
)
_SAME_STEPS: Final = "Ranks must all take the same steps; timeout_s= of distributed says how long they wait"
_FRAME: Final = re.compile(r'^\s+File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>.+)$', re.MULTILINE)


@dataclass(frozen=True)
class End:
    """The end of a rank, with a value or an error."""

    rank: int
    label: str  # its name in messages
    value: Any
    error: BaseException | None
    at: float  # on the clock of time.monotonic
    says_others: bool = False  # it says itself that another rank did not answer

    @property
    def is_last_word(self) -> bool:
        """Whether this is why the call failed, whatever other ranks say."""
        return not (self.is_of_others or isinstance(self.error, WorkerTimeoutError))

    @property
    def is_of_others(self) -> bool:
        """Whether it failed because another rank did."""
        if self.says_others or isinstance(self.error, WorkerStoppedError):
            return True
        return isinstance(self.error, WorkerDiedError) and _WATCHDOG.search(self.error.tail) is not None


def of_all(ends: Sequence[End]) -> BaseException:
    """Return the error of a call whose ranks have ended like this: it names the one that failed first."""
    failed = sorted((end for end in ends if end.error is not None), key=lambda end: end.at)
    own = [end for end in failed if not end.is_of_others]
    timed_out = [end for end in own if isinstance(end.error, WorkerTimeoutError)]
    if own and len(timed_out) < len(own):
        return _error(next(end for end in own if end not in timed_out))
    if timed_out:
        return _late([*timed_out, *(end for end in failed if isinstance(end.error, WorkerStoppedError))])
    # No rank failed by itself: the others waited for a rank that still ran when they gave up.
    waited = [end for end in failed if not isinstance(end.error, WorkerStoppedError)]
    hung = [end for end in failed if isinstance(end.error, WorkerStoppedError)]
    if waited and hung:
        names = " and ".join(f"{end.label} ({where(end)})" for end in hung)
        error = RankError(
            f"{names} did not answer: {waited[0].label} waited for it in vain ({text_of(waited[0].error)}). "
            f"{_SAME_STEPS}",
            hung[0].rank,
        )
        error.__cause__ = waited[0].error
        return error
    if waited:
        return _in_vain(waited[0])
    return _error(hung[0])


def where(end: End) -> str:
    """Return where the main thread of a rank was when it was ended, as far as it could tell."""
    found = _FRAME.search(str(end.error))
    return f"at {found['file']}:{found['line']} in {found['name']}" if found else "where it could not say"


def _error(end: End) -> BaseException:
    error = end.error
    assert error is not None
    if not isinstance(error, Exception):  # KeyboardInterrupt, SystemExit: not the rank's
        return error
    names_it = isinstance(error, WorkerDiedError | WorkerTaskError)
    text = str(error) if names_it else f"{end.label}: {text_of(error)}"
    return _caused(text, end)


def _in_vain(end: End) -> BaseException:
    """Return the error of a rank that speaks of the others, where none of them was lost or late."""
    if isinstance(end.error, WorkerDiedError):
        return _error(end)
    text = f"{end.label}: {text_of(end.error)}. No other rank failed before. {_SAME_STEPS}"
    return _caused(text, end)


def _late(ends: Sequence[End]) -> WorkerTimeoutError:
    names = "; ".join(f"{end.label} was {where(end)}" for end in sorted(ends, key=lambda end: end.rank))
    return WorkerTimeoutError(
        f"no result within timeout_s: {names}. All ranks were ended. Raise timeout_s if they were only slow"
    )


def _caused(text: str, end: End) -> RankError:
    error = RankError(text, end.rank)
    error.__cause__ = end.error
    return error
