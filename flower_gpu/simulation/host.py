"""A host: a machine that handles messages of a run. The interface between it and the grid."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Protocol

from flwr.clientapp import ClientApp

from flower_gpu.options import CallOptions
from flower_gpu.simulation.in_worker import AppReference
from flower_gpu.simulation.nodes import VirtualNodes
from flower_gpu.simulation.visits import Answers, Visit

#: How many messages a worker handles if nobody says how many: only the kernel and other users end it before.
MANY: Final = 1000
#: Of shorter messages the handing over of others takes a part that counts.
_SHORT_S: Final = 0.1
# Short messages wait there that take so long together: so many may be needed until the next ones come.
_AHEAD_S: Final = 0.5
_LEAST_S: Final = 1e-3  # that a message is taken for


@dataclass(frozen=True)
class Work:
    """What a host must know of a run. It can be pickled.

    ``name``: the app's.
    ``app``: what handles messages.
    ``options``: of each call.
    ``num_supernodes``: how many virtual nodes there are.
    ``seed``, ``max_workers``, ``calls_per_worker``, ``verify_recycling``: as :func:`flower_gpu.simulate` has
    them.
    ``run_id``, ``run_config``: what contexts have.
    ``is_deterministic``: whether algorithms must give the same bits each time.
    ``is_strict``: whether what another run would not have ends this one.
    """

    name: str
    app: AppReference | ClientApp
    options: CallOptions
    num_supernodes: int
    seed: int
    run_id: int
    run_config: Mapping[str, Any]
    max_workers: int | None = None
    calls_per_worker: int = MANY
    verify_recycling: bool = False
    is_deterministic: bool = False
    is_strict: bool = False


@dataclass(frozen=True)
class About:
    """What a host says of itself.

    ``name``: the machine's.
    ``concurrency``: how many messages it handles at a time, at most.
    ``threads``: of each worker's libraries.
    ``described``: processors, GPUs and versions, as the settings of a run have them.
    ``cores``: how many it has.
    ``gpus``: its GPUs, as the trace has them.
    """

    name: str
    concurrency: int
    threads: int
    described: dict[str, Any]
    cores: int
    gpus: list[dict[str, Any]]


class Host(ABC):
    """Handles messages: it takes visits, and returns answers.

    One thread at a time calls :meth:`exchange`; the others may be called by any thread.

    ``about``: what it says of itself.
    ``is_gone``: whether it is lost.
    ``is_full``: whether it can take no more messages at this moment.
    ``under_way``: how many messages it has.
    ``is_for_one``: whether it gets no other message until the one is done that it has.
    ``messages``, ``failed``: how many replies came from it, and how many of them were errors.
    ``call_s``: how long it handles a message of each type, a mean of the last ones.
    """

    #: Whether it may be lost, with what it has.
    can_be_lost: ClassVar[bool] = True

    def __init__(self, about: About) -> None:
        self.about = about
        self.is_gone = self.is_full = self.is_for_one = False
        self.under_way = self.messages = self.failed = 0
        self.call_s: dict[str, float] = {}

    @property
    def name(self) -> str:
        """The machine's."""
        return self.about.name

    @abstractmethod
    def take(self, visits: Sequence[Visit]) -> None:
        """Have messages handled, in this order. That the host is gone is told by :meth:`exchange`."""

    @abstractmethod
    def exchange(self, visits: Sequence[Visit]) -> Answers:
        """Have messages handled; waits, not for long, for what has become of others.

        Raises Exception if the host is gone, or of no use.
        """

    @abstractmethod
    def ask_for_sum(self, group: int) -> None:
        """Have the sum of a group come with the next answers; the group begins anew."""

    @abstractmethod
    def forget(self, groups: Sequence[int]) -> None:
        """Give up groups whose sums nobody wants."""

    @abstractmethod
    def cancel(self, message_id: str) -> None:
        """Give up a message, also one that comes later."""

    def stuck_since(self) -> float | None:
        """Return since when messages wait and none has a worker; None where that is not so, or not known."""
        return None

    def lost(self, error: Exception, left: int) -> None:  # noqa: B027
        """Take note of the error for which nobody asks this host any more, and how many others there are."""

    def learn(self, kind: str, seconds: float) -> None:
        """Take note of how long a message was handled here."""
        self.call_s[kind] = (3 * self.call_s.get(kind, seconds) + seconds) / 4

    def most(self, kind: str) -> int:
        """Return how many messages it has at most: those that it handles, and short ones that wait there."""
        call_s = self.call_s.get(kind)
        if call_s is None or call_s > _SHORT_S:
            return self.about.concurrency
        ahead = _AHEAD_S / max(call_s, _LEAST_S) * self.about.concurrency
        return self.about.concurrency + int(ahead)


class Hosts(Protocol):
    """The hosts of a run, made by an engine from a :class:`Work`."""

    @property
    def concurrency(self) -> int:
        """How many messages are handled at a time, at most."""

    @property
    def threads(self) -> int:
        """Of each worker's libraries."""

    def described(self) -> dict[str, Any]:
        """Return the models of processors and GPUs, and versions, as the settings of a run have them."""

    def where(self) -> str:
        """Say where messages are handled."""

    def begin(self, nodes: VirtualNodes, joined: Callable[[Host], object]) -> None:
        """Get ready for messages to these nodes; ``joined`` is told of each host that is there, or joins."""

    def has_begun(self) -> None:
        """Take note that the trace says that the run has begun."""

    def load_data(self) -> None:
        """Load the data for calls, if there are any."""

    def facts(self) -> dict[str, Any]:
        """Return the hosts' facts for the result."""

    def close(self) -> None:
        """End all workers."""
