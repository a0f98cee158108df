"""How many messages a worker handles: found out by a run from its own first messages.

A new worker costs an app its imports, its data and the first step of its framework. Each kind of message goes
through three steps, and messages of other threads have new workers meanwhile:

    what it saves   a new worker handles a message, and then a copy of it: the same client again
    what it changes a used worker handles a copy of another client's message, which a new worker handles, too
    from then on    used workers handle messages; one in each round is compared in the same way

Copies leave no state. Where a message is compared, the strategy gets the new worker's reply. On a GPU a new
worker has to start CUDA: the first step is left out, and used workers do not wait for the second.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from enum import Enum
from logging import WARNING
from math import inf
from statistics import median
from typing import Any, Final

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.common.logger import log

from flower_gpu.errors import NotDeterministicError
from flower_gpu.printable import duration_text

#: Messages of one worker, where only the kernel and other users of a GPU set a limit.
MANY: Final = 1000
#: The same where a GPU is used, and nothing can be compared: a CUDA context takes 0.2 to 0.5 s.
_ON_GPU: Final = 16
#: Messages that ``verify_recycling`` has handled a second time.
CHECKS: Final = 3

_WORTH: Final = 0.1  # of a message's time must be saved
_CLEARLY: Final = 0.5  # if so much is saved, one message is enough
_TRIALS: Final = 3  # else, of a message that takes less than
_SHORT_S: Final = 2.0
_OTHERS: Final = 2  # messages of other clients that are compared before used workers' replies count
_EARLY: Final = 12  # new workers that may not be as later ones; then this is how they are
_MOST_NAMES: Final = 3

#: What differs between two results, and how much relative to the largest value; infinity without a size.
Differences = dict[str, float]


class Role(Enum):
    """How a message is handled."""

    NEW = "by a new worker, which ends"
    KEPT = "by a new worker, which stays, or by a used one"
    TRIED = "by a new worker, which handles a copy as well: what does it save?"
    COMPARED = "by a new worker, and a copy by the used one: what does it change?"


@dataclass
class Handled:
    """What came of a message: the reply, or why there is none, and the client's context."""

    context: Context
    reply: Message | None = None
    error: BaseException | None = None


@dataclass
class _Kind:
    """What is known of one kind of message, such as ``"train"``."""

    saves: bool | None = None
    seen: int = 0  # messages until that was clear
    pairs: list[tuple[float, float]] = field(default_factory=list)  # seconds of a new worker, of a used one
    early: int = 0  # new workers that were not as later ones
    asked: int = 0  # comparisons that were begun
    compared: int = 0  # and done
    round: int | None = None  # of the last one

    def text(self) -> str:
        """Say what was found out."""
        if self.saves and not self.pairs:
            return "a new worker would have to start CUDA"
        if self.saves is None:
            return "too few messages to find out whether used workers save time"
        new, used = map(duration_text, self.seconds())
        return f"a message takes {used} in a used worker and {new} in a new one"

    def seconds(self) -> tuple[float, float]:
        """Return what a message takes in a new worker and in a used one; medians."""
        new_s, used_s = zip(*self.pairs, strict=True)
        return median(new_s), median(used_s)


@dataclass(frozen=True)
class Comparison:
    """What was different between the results of one message."""

    client: str
    used: Differences  # between a new worker and a used one
    noise: Differences  # between two new workers: that says nothing
    changed: list[str]  # globals of the app's modules that a call changes


class Recycling:
    """Says for each message which worker handles it. Methods may be called by several threads.

    Parameters
    ----------
    calls_per_worker : int, optional
        How many messages a worker handles, at most. Default: what saves time and changes nothing.
    verifies : bool
        Whether :data:`CHECKS` messages are compared where ``calls_per_worker`` is given.
    on_gpu : bool
        Whether messages have leases.
    first : int
        So many messages of each kind have new workers before anything is tried: a run that has no more would
        not gain by it.
    is_strict : bool
        Whether weights that are different each time, or in used workers, end the run.
    """

    def __init__(
        self,
        calls_per_worker: int | None = None,
        *,
        verifies: bool = False,
        on_gpu: bool = False,
        first: int = 0,
        is_strict: bool = False,
    ) -> None:
        self._given = calls_per_worker
        self._is_strict = is_strict
        self._first = first
        self._on_gpu = on_gpu
        self._checks = CHECKS if verifies else 0
        self._lock = threading.Lock()
        self._kinds: dict[str, _Kind] = {}
        self._is_trying = False
        self._stopped = ""  # why nothing is tried any more
        self._most = MANY  # messages of a worker
        self._clients: set[str] = set()  # whose replies of used workers were different
        self._largest = 0.0
        self._compared = 0

    def role(self, kind: str, server_round: int | None, *, is_used: bool, is_long: bool = False) -> Role:
        """Return how a message is to be handled.

        Parameters
        ----------
        kind : str
            The message's type.
        server_round : int, optional
            Its round.
        is_used : bool
            Whether the worker that waits has handled others.
        is_long : bool
            Whether the round may have to wait for this message: then no copy of it is handled.
        """
        with self._lock:
            # On a GPU a new worker has to start CUDA: nothing has to be tried.
            found = self._kinds.setdefault(kind, _Kind(saves=True if self._on_gpu else None))
            if self._given is not None:
                if is_used and self._checks and not is_long:
                    self._checks -= 1
                    return Role.COMPARED
                return Role.KEPT if self._given > 1 else Role.NEW
            if self._stopped:
                return Role.KEPT if self._most > 1 else Role.NEW
            if found.saves is False:
                return Role.NEW
            if found.saves is None:
                found.seen += 1
                if self._is_trying or found.seen <= self._first or is_long:
                    return Role.NEW
                self._is_trying = True
                return Role.TRIED
            is_due = found.asked < _OTHERS or (found.compared >= _OTHERS and server_round != found.round)
            if is_due and not (is_used and is_long):
                if is_used:
                    found.asked += 1
                    found.round = server_round
                    return Role.COMPARED
                return Role.KEPT
            return Role.KEPT if found.compared >= _OTHERS or self._on_gpu else Role.NEW

    def calls(self, role: Role) -> int:
        """Return how many messages the worker may handle that such a message has or gets."""
        return 1 if role is Role.NEW else self._given or self._most

    def is_too_early(self, kind: str) -> bool:
        """Take note that a new worker was not as later ones will be; tell whether to wait for these."""
        with self._lock:
            found = self._kinds[kind]
            found.early += 1
            is_early = found.early <= _EARLY
            self._is_trying = not is_early
            return is_early

    def tried(self, kind: str, new_s: float, used_s: float | None, import_s: float | None = None) -> None:
        """Take note of what a message took in a new worker, and then in the same one; None: it left.

        ``import_s``: what of it were imports, at least, that later new workers do without; None: nothing.
        """
        with self._lock:
            self._is_trying = False
            found = self._kinds[kind]
            if used_s is None:
                self._stop("no worker stays for a second message")
                return
            new_s -= import_s or 0.0
            is_clear = used_s < (1 - _CLEARLY) * new_s
            if import_s is not None and not is_clear and found.early < _EARLY:
                found.early += 1  # imports take longer than is known
                return
            found.pairs.append((new_s, used_s))
            if is_clear or len(found.pairs) >= _TRIALS or new_s > _SHORT_S:
                new_s, used_s = found.seconds()
                found.saves = used_s < (1 - _WORTH) * new_s

    def gave_up(self, kind: str, role: Role) -> None:
        """Take note that nothing was found out: the message has failed, or its worker had left."""
        with self._lock:
            if role is Role.TRIED:
                self._is_trying = False
            elif self._given is not None:
                self._checks += 1
            else:
                self._kinds[kind].asked -= 1

    def compared(self, kind: str, role: Role, found: Comparison) -> None:
        """Take note of a comparison.

        Raises
        ------
        NotDeterministicError
            If there are differences, and the run is strict.
        """
        noise = [name for name in found.noise if name.startswith(_ARRAY)]
        different = {} if noise else _without(found.used, found.noise)
        with self._lock:
            self._compared += 1
            self._kinds[kind].compared += role is Role.COMPARED
            if noise:
                text = f"new workers give {_listed(noise)} of client {found.client} other values each time"
                self._stop(f"{text}, so that used ones cannot be checked", _ON_GPU if self._on_gpu else 1)
            if different:
                self._clients.add(found.client)
                self._largest = max(self._largest, *different.values())
                self._stop(
                    f"used workers give {_listed(list(different))} of client {found.client} another value"
                )
        if self._is_strict and noise:
            raise NotDeterministicError(
                f"{kind} of client {found.client}: two new workers give other values of {_listed(noise)}. "
                "What does the app draw from a generator that it seeds by itself, or take from the clock?"
            )
        if self._is_strict and different:
            changed = f" A call changes {_listed(found.changed)}." if found.changed else ""
            raise NotDeterministicError(
                f"{kind} of client {found.client}: a used worker gave another {_listed(list(different))} "
                f"than a new one. The app keeps something from one call to the next.{changed} Use "
                "--calls-per-worker 1"
            )
        if different:
            _warn(kind, found, different, ends=self._given is None)

    def _stop(self, reason: str, most: int = 1) -> None:
        """Try and compare nothing from now on; the lock is held."""
        if self._given is None and (not self._stopped or most < self._most):
            self._stopped, self._most = reason, most

    def facts(self) -> dict[str, Any]:
        """Return what was chosen and found, for the summary."""
        return {
            "is_used_again": self._is_used_again(),
            "reason": self._reason(),
            "compared": self._compared,
            "different_clients": sorted(self._clients),
            "largest_relative_difference": self._largest,
        }

    def _is_used_again(self) -> bool:
        if self._given is not None:
            return self._given > 1
        return self._most > 1 and (bool(self._stopped) or any(kind.saves for kind in self._kinds.values()))

    def _reason(self) -> str:
        if self._given is not None:
            return f"calls_per_worker is {self._given}"
        return self._stopped or "; ".join(f"{name}: {kind.text()}" for name, kind in self._kinds.items())


_ARRAY = "array "


def differences(one: Handled, other: Handled) -> Differences:
    """Return what is different between two results of one message, bit for bit: in reply and state."""
    if one.error is not None or other.error is not None:
        error = one.error or other.error
        return {} if type(one.error) is type(other.error) else {f"result, {type(error).__name__}": inf}
    assert one.reply is not None and other.reply is not None
    if one.reply.has_content() != other.reply.has_content():
        return {"reply": inf}
    found = _of_records(one.context.state, other.context.state, "state ")
    if one.reply.has_content():
        found |= _of_records(one.reply.content, other.reply.content, "metric ")
    return found


def _of_records(one: RecordDict, other: RecordDict, kind: str) -> Differences:
    found: Differences = {}
    for name in dict.fromkeys([*one, *other]):
        a: Any = one.get(name, {})
        b: Any = other.get(name, {})
        for key in dict.fromkeys([*a, *b]):
            if size := difference(a.get(key), b.get(key)):
                is_array = isinstance(a, ArrayRecord) and kind != "state "
                found[f"{_ARRAY if is_array else kind}{name}.{key}"] = size
    return found


def difference(one: Any, other: Any) -> float:
    """Return how much two values of records differ, relative to the largest; 0: not in a single bit."""
    if type(one) is not type(other):
        return inf
    a, b = (each.numpy() if isinstance(each, Array) else np.asarray(each) for each in (one, other))
    if a.shape != b.shape or a.dtype != b.dtype:
        return inf
    if a.tobytes() == b.tobytes():
        return 0.0
    if a.dtype.kind not in "biuf":
        return inf
    a, b = a.astype(np.float64), b.astype(np.float64)
    scale = max(*(float(np.max(np.abs(each), initial=0.0)) for each in (a, b)), np.finfo(np.float64).tiny)
    relative = float(np.max(np.abs(a - b), initial=0.0)) / scale
    # Also of NaN, and of zeros with another sign, which are as large.
    return relative if relative > 0 else inf


def _warn(kind: str, found: Comparison, different: Differences, *, ends: bool) -> None:
    changed = f" A call changes {_listed(found.changed)}." if found.changed else ""
    log(
        WARNING,
        "Client %s, %s: a used worker gave another %s than a new one (by %.3g of the largest value). The app "
        "keeps something from one call to the next.%s%s",
        *(found.client, kind, _listed(list(different)), max(different.values()), changed),
        " Each worker handles one message from now on." if ends else "",
    )


def _without(found: Differences, noise: Differences) -> Differences:
    return {name: size for name, size in found.items() if name not in noise}


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more
