"""Flower's own strategies on a grid of ours: replies to a round's training are summed as they come.

``Strategy.start`` hands what ``send_and_receive`` returns to ``aggregate_train``, and does nothing in
between. So for the time of a run

    configure_train     marks its messages           (``Configured``)
    send_and_receive    returns replies to come      (``ComingReplies``), if its messages have that mark
    aggregate_train     of FedAvg, which FedProx, FedAvgM, FedAdam, FedYogi and FedAdagrad call, sums them

Whoever looks at the replies in another way, gets all of them: strategies that need them together, such as
FedMedian or Krum, wrappers for differential privacy, classes of a user. They come in the order of sending.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import wraps
from typing import Any, overload

from flwr.app import ArrayRecord, Message, MetricRecord
from flwr.serverapp.exception import InconsistentMessageReplies
from flwr.serverapp.strategy import FedAvg, Strategy

from flower_gpu.flower.averaging import ReplySum, Sums, in_order_of_sending, place, without_arrays
from flower_gpu.flower.node_logs import InOrder

Aggregated = tuple[ArrayRecord | None, MetricRecord | None]

_FLOWERS, _OURS = "flwr.", "flower_gpu.flower."


class Configured(list[Message]):
    """Messages of a strategy whose replies go to ``aggregate_train``, and to nobody before."""


class Buffered(list[Message]):
    """Messages whose replies are of the round in which they are taken, and count from then on."""


class ComingReplies(Sequence[Message]):
    """Replies that are fetched when somebody looks at them: then all of them, to keep.

    ``replies``: as they come.
    ``sums``: the same for whoever sums them: then they are summed where they are made.
    """

    def __init__(self, replies: Iterable[Message], sums: Sums) -> None:
        self._coming: Iterable[Message] | None = replies
        self._sums = sums
        self._there: list[Message] = []

    @overload
    def __getitem__(self, index: int) -> Message: ...
    @overload
    def __getitem__(self, index: slice) -> list[Message]: ...
    def __getitem__(self, index: int | slice) -> Message | list[Message]:
        return self.all()[index]

    def __len__(self) -> int:
        return len(self.all())

    def __iter__(self) -> Iterator[Message]:
        return iter(self.all())

    def all(self) -> list[Message]:
        """Wait for all replies, and return them."""
        if self._coming is not None:
            coming, self._coming = self._coming, None
            self._there = in_order_of_sending(coming)
        return self._there

    @property
    def is_new(self) -> bool:
        """Whether nobody has looked at them."""
        return self._coming is not None

    def take(self) -> Sums | None:
        """Return the sums of the replies, which are then not here; None if somebody has them already."""
        coming, self._coming = self._coming, None
        return None if coming is None else self._sums


def aggregate(
    strategy: FedAvg, replies: Iterable[Message], total: ReplySum, *, in_order: bool = False
) -> Aggregated:
    """Average replies one by one, by a strategy's functions.

    ``strategy``: checks and logs the replies, and aggregates their metrics.
    ``replies``: where they are no sequence, each is freed before the next comes. :class:`ComingReplies` come
    as sums.
    ``total``: what they are added to.
    ``in_order``: whether sums are formed in the order of the nodes.
    Returns what ``aggregate_train`` returns.
    Raises InconsistentMessageReplies if the replies do not go together.
    Raises InvalidResultError if arrays of the same name do not go together; it is a ValueError.
    """
    rest: list[Message] = []
    sums = replies.take() if isinstance(replies, ComingReplies) else None
    if sums is not None:
        # Closed at the end: after an error nobody waits for the others.
        with closing(sums(strategy.weighted_by_key, total.keeps_integers, in_order)) as coming:
            for item in coming:
                if isinstance(item, Message):
                    rest.append(item)
                else:
                    source, part = item
                    total.merge(part, source)
                    del part
                del item
        rest = in_order_of_sending(rest)
    else:
        if in_order and not isinstance(replies, InOrder):
            replies = sorted(replies, key=place)
        is_kept = isinstance(replies, Sequence)
        for reply in replies:
            total.add(reply)
            rest.append(reply if is_kept else without_arrays(reply))
            del reply  # it must not stay in memory while the next one is waited for
    valid, _ = strategy._check_and_log_replies(rest, is_train=True)
    if not valid:
        return None, None
    if total.misfit:
        raise InconsistentMessageReplies(total.misfit)
    contents = [reply.content for reply in valid]
    return total.finish(), strategy.train_metrics_aggr_fn(contents, strategy.weighted_by_key)


def configured(strategy: Any, messages: Any) -> Any:
    """Mark the messages of a strategy that Flower's own ``start`` runs. Other strategies do not change."""
    is_flowers = isinstance(strategy, Strategy) and type(strategy).start is Strategy.start
    return Configured(messages) if is_flowers and type(messages) is list else messages


@contextmanager
def streamed_strategies() -> Iterator[None]:
    """Have Flower's FedAvg, and strategies built on it, sum replies as they come, while in the context."""
    original = FedAvg.aggregate_train

    @wraps(original)
    def aggregate_train(self: FedAvg, server_round: int, replies: Iterable[Message]) -> Aggregated:
        if isinstance(replies, ComingReplies) and replies.is_new and sums_only(self):
            # The mean of integers is a float64, as in Flower.
            return aggregate(self, replies, ReplySum(self.weighted_by_key, keeps_integers=False))
        return original(self, server_round, replies)

    replaced: Any = FedAvg
    replaced.aggregate_train = aggregate_train
    try:
        yield
    finally:
        replaced.aggregate_train = original


def sums_only(strategy: FedAvg) -> bool:
    """Tell whether nothing but Flower's code or ours sees the replies, and no function of the user's.

    One that aggregates metrics may see those of our own strategy, without their arrays.
    """
    kind = type(strategy)
    functions: list[Any] = [kind.aggregate_train, kind._check_and_log_replies]
    modules = [str(getattr(each, "__module__", "")) for each in functions]
    if not modules[0].startswith(_OURS):
        modules.append(str(getattr(strategy.train_metrics_aggr_fn, "__module__", "")))
    known = all(module.startswith((_FLOWERS, _OURS)) for module in modules)
    return known and not {"aggregate_train", "_check_and_log_replies"} & vars(strategy).keys()
