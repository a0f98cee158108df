"""Flower's own strategies on our grids: the replies to a round's training are summed as they arrive.

``Strategy.start`` passes the result of ``send_and_receive`` to ``aggregate_train``, and does nothing in
between. So during a run

    configure_train     has its messages marked      (``Configured``)
    send_and_receive    returns replies to come      (``ComingReplies``), if its messages have that mark
    aggregate_train     of FedAvg, which FedProx, FedAvgM, FedAdam, FedYogi and FedAdagrad call, sums them

Code that reads the replies in any other way waits for all of them and gets a list in the order of sending.
That covers strategies that need the replies together, such as FedMedian or Krum, wrappers for differential
privacy, and a user's own classes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import wraps
from typing import Any

from flwr.app import ArrayRecord, Message, MetricRecord
from flwr.serverapp.exception import InconsistentMessageReplies
from flwr.serverapp.strategy import FedAvg, Strategy

from flower_gpu.strategies.averaging import ReplySum, Sums, in_order_of_sending, place, without_arrays

Aggregated = tuple[ArrayRecord | None, MetricRecord | None]

_FLOWERS, _OURS = "flwr.", "flower_gpu.strategies."


class InOrder(list[Message]):
    """Replies in the order of the clients, which is more stable than the order of node ids."""


class Configured(list[Message]):
    """Messages of a strategy. No other code sees their replies before ``aggregate_train``."""


class Buffered(list[Message]):
    """Messages with replies that count in the round that consumes them, not in the round that sent them."""


class ComingReplies(Sequence[Message]):
    """A sequence of replies that waits for all of them on the first access, and then keeps them.

    ``replies``: iterator that yields each reply when it arrives.
    ``sums``: returns the same replies as partial sums, which are formed in the processes of the replies.
    """

    def __init__(self, replies: Iterable[Message], sums: Sums) -> None:
        self._coming: Iterable[Message] | None = replies
        self._sums = sums
        self._arrived: list[Message] = []

    def __getitem__(self, index: Any) -> Any:
        return self.all()[index]

    def __len__(self) -> int:
        return len(self.all())

    def __iter__(self) -> Iterator[Message]:
        return iter(self.all())

    def all(self) -> list[Message]:
        """Wait for all replies, and return them."""
        if self._coming is not None:
            coming, self._coming = self._coming, None
            self._arrived = in_order_of_sending(coming)
        return self._arrived

    @property
    def is_new(self) -> bool:
        """Whether the replies have not been accessed yet."""
        return self._coming is not None

    def take(self) -> Sums | None:
        """Return the sums of the replies and keep none; None if the replies were accessed before."""
        coming, self._coming = self._coming, None
        return None if coming is None else self._sums


def aggregate(
    strategy: FedAvg, replies: Iterable[Message], total: ReplySum, *, in_order: bool = False
) -> Aggregated:
    """Return the average of the replies, added one by one, and their metrics, as ``aggregate_train`` does.

    ``strategy``: checks and logs the replies, and aggregates their metrics.
    ``replies``: unless they are a sequence, each is freed before the next is fetched. :class:`ComingReplies`
    arrive as partial sums.
    ``total``: sum to which the replies are added.
    ``in_order``: whether sums are formed in the order of the nodes.
    Raises InconsistentMessageReplies if the replies have different records or keys.
    Raises InvalidResultError, a ValueError, if arrays of the same name do not fit together.
    """
    rest: list[Message] = []
    sums = replies.take() if isinstance(replies, ComingReplies) else None
    if sums is not None:
        # Closing the generator after an error ends the wait for the other replies.
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
            del reply  # frees its memory before the wait for the next reply
    valid, _ = strategy._check_and_log_replies(rest, is_train=True)
    if not valid:
        return None, None
    if total.misfit:
        raise InconsistentMessageReplies(total.misfit)
    contents = [reply.content for reply in valid]
    return total.finish(), strategy.train_metrics_aggr_fn(contents, strategy.weighted_by_key)


def configured(strategy: Any, messages: Any) -> Any:
    """Return the messages, marked as :class:`Configured` if Flower's own ``start`` runs the strategy."""
    is_flowers = isinstance(strategy, Strategy) and type(strategy).start is Strategy.start
    return Configured(messages) if is_flowers and type(messages) is list else messages


@contextmanager
def streamed_strategies() -> Iterator[None]:
    """Within the context, Flower's FedAvg and strategies built on it sum replies as they arrive."""
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
    """Return True if only Flower's code or ours sees the replies, and no function of the user.

    The exception: with our own strategy, a user's function for metrics may see them, without their arrays.
    """
    kind = type(strategy)
    functions: list[Any] = [kind.aggregate_train, kind._check_and_log_replies]
    modules = [str(getattr(function, "__module__", "")) for function in functions]
    if not modules[0].startswith(_OURS):
        modules.append(str(getattr(strategy.train_metrics_aggr_fn, "__module__", "")))
    known = all(module.startswith((_FLOWERS, _OURS)) for module in modules)
    return known and not {"aggregate_train", "_check_and_log_replies"} & vars(strategy).keys()
