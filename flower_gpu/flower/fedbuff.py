"""FedBuff: every few updates make the next version of the model, and no client waits for another.

::

    configure_train ──> UnderWay ──> aggregate_train ──> configure_evaluate
    a message for       messages     the sum of the      the new version goes
    each free place     and replies  updates             to free places

A round is what makes one version; :mod:`flower_gpu.flower.rounds` has the loop.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from logging import INFO
from typing import Any, cast

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from flower_gpu.errors import ConfigError
from flower_gpu.flower import rounds, streaming
from flower_gpu.flower.averaging import ReplySum, weight_of
from flower_gpu.flower.records import ROUND_KEY
from flower_gpu.flower.strategy import FedAvg
from flower_gpu.flower.under_way import UnderWay
from flower_gpu.kinds import COUNT, POSITIVE


def inverse_root(rounds_behind: int) -> float:
    """Return what an update counts that is so many rounds behind, as in the paper."""
    return 1 / math.sqrt(1 + rounds_behind)


class FedBuff(FedAvg):
    """Rounds that wait for nobody: buffered asynchronous aggregation for the Message API.

    FedBuff (Nguyen et al., 2022, https://arxiv.org/abs/2106.06639). When a client is done, another one, drawn
    from those without a message, gets the newest model at once. An update is what a client has changed of the
    model that it was sent. ``buffer_size`` of them make the next version, which ends a round::

        model += server_learning_rate * sum(examples * staleness * update) / sum(examples)

    Arrays keep the dtype that they have in the initial model. An update with 0 examples leaves the model as
    it is.

    The server evaluates as for :class:`FedAvg`, and ``start`` has the same parameters. ``timeout`` limits
    each message on its own: seconds until its client counts as failed. In a simulation the time in which no
    worker can have a lease does not count. A client that fails is not asked again for this version. At the
    end the run does not wait for clients that still train.

    Parameters
    ----------
    buffer_size : int
        How many updates make the next version.
    concurrency : int
        How many clients train at a time; more than workers, so that each of these always has work.
    staleness : callable, optional
        What an update counts that is a number of rounds behind: ``int -> float``, 0 or more. Default:
        ``1 / sqrt(1 + rounds_behind)``.
    server_learning_rate : float
        By what the mean of the updates is multiplied.
    min_available_nodes : int, optional
        So many nodes have to be there at the start; by default ``concurrency``.
    weighted_by_key, arrayrecord_key, configrecord_key, train_metrics_aggr_fn
        As for :class:`FedAvg`.
    exact_order : bool
        Take replies in the order of a virtual clock, however long that takes, so that a run can be repeated.
        ``flower-gpu simulate --deterministic`` does so in any case.

    Raises
    ------
    ConfigError, TypeError
        If a value cannot be used.
    ClientsFailedError
        By ``start``, if no message of a round could be sent, or if no client has sent an update in any round.
    """

    def __init__(
        self,
        buffer_size: int = 10,
        concurrency: int = 20,
        staleness: Callable[[int], float] = inverse_root,
        server_learning_rate: float = 1.0,
        min_available_nodes: int | None = None,
        weighted_by_key: str = "num-examples",
        arrayrecord_key: str = "arrays",
        configrecord_key: str = "config",
        train_metrics_aggr_fn: Callable[[list[Any], str], MetricRecord] | None = None,
        exact_order: bool = False,
    ) -> None:
        self.buffer_size: int = COUNT.check(buffer_size, "FedBuff: buffer_size")
        self.concurrency: int = COUNT.check(concurrency, "FedBuff: concurrency")
        self.server_learning_rate: float = POSITIVE.check(
            server_learning_rate, "FedBuff: server_learning_rate"
        )
        self.staleness = staleness
        self.counts(0)
        super().__init__(
            min_train_nodes=concurrency,
            min_available_nodes=min_available_nodes or concurrency,
            weighted_by_key=weighted_by_key,
            arrayrecord_key=arrayrecord_key,
            configrecord_key=configrecord_key,
            train_metrics_aggr_fn=train_metrics_aggr_fn or _mean_of_metrics,
            exact_order=exact_order,
        )

    def counts(self, rounds_behind: int) -> float:
        """Return what an update counts that is so many rounds behind."""
        value = self.staleness(rounds_behind) if callable(self.staleness) else None
        if not (isinstance(value, int | float) and 0 <= value < math.inf):
            raise ConfigError(
                "FedBuff: staleness must be a function of how many rounds an update is behind that returns a "
                f"number, 0 or more; for {rounds_behind} there is {value!r}"
            )
        return value

    def summary(self) -> None:
        """Log the sizes."""
        log(INFO, "\t└──> %d updates make a round, %d clients train", self.buffer_size, self.concurrency)

    def _run(self, grid: Grid, initial_arrays: ArrayRecord, *given: Any) -> Result:
        *rest, evaluate_fn = given
        under_way = self._under_way = UnderWay(self, grid, initial_arrays, *rest[:3])

        def evaluate(server_round: int, arrays: ArrayRecord) -> Any:
            with under_way.filled():
                return evaluate_fn(server_round, arrays)

        wrapped = evaluate if evaluate_fn else None
        try:
            run: Callable[..., Result] = rounds.run
            result = run(self, under_way, initial_arrays, *rest, wrapped, strategy_state=under_way)
            under_way.check_updated()
            return result
        finally:
            under_way.give_up()

    @property
    def checkpoint_kind(self) -> str:
        """Name of the strategies that can go on from a checkpoint of this one."""
        return "flower_gpu.FedBuff"

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return a message for each free place; also called within a round."""
        if not isinstance(grid, UnderWay):
            raise ConfigError("FedBuff has a loop of its own: call its start(), not that of another strategy")
        # A copy: messages of this round may be read when the next one has begun.
        config = ConfigRecord({**config, ROUND_KEY: server_round})
        record = RecordDict({self.arrayrecord_key: arrays, self.configrecord_key: config})
        return self._construct_messages(record, grid.next_nodes(), MessageType.TRAIN)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Sum updates as they come, and return the next version of the model; see :class:`FedAvg`."""
        return streaming.aggregate(self, replies, _UpdateSum(self, self._under_way, server_round))

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return no messages. Before the server evaluates a new version, free places train it."""
        self._under_way.go_on_with(arrays, server_round + 1)
        return []


class _UpdateSum(ReplySum):
    """The weighted sum of updates, and the model that they make of the version before.

    Each update is the difference between the reply and the model that its client was sent.
    """

    def __init__(self, strategy: FedBuff, under_way: UnderWay, server_round: int) -> None:
        super().__init__(strategy.weighted_by_key)
        self._strategy = strategy
        self._under_way = under_way
        self._round = server_round
        self._examples = 0.0

    def add(self, reply: Message, source: str | None = None) -> None:
        """Add an update."""
        super().add(reply, source or self._under_way.name_of(reply.metadata.src_node_id))

    def _add(self, reply: Message, record: ArrayRecord, weight: float, source: str) -> None:
        sent = self._under_way.to_sum.pop(reply.metadata.reply_to_message_id)
        before = cast(ArrayRecord, sent.content[self._strategy.arrayrecord_key])
        if record.keys() != before.keys():
            self._has_misfit(f"The reply of {source} has other arrays than it was sent.")
            return
        if not 0 <= weight < math.inf:
            key = self._strategy.weighted_by_key
            self._has_misfit(f"The reply of {source} has {weight} for {key!r}, which must be 0 or more.")
            return
        factor = weight * self._strategy.counts(self._round - sent.server_round)
        self._examples += weight
        if factor:  # otherwise the update counts nothing, even if it is infinite
            self.mean.add_change(record, before, factor, source)

    def finish(self) -> ArrayRecord:
        """Return the next version of the model; the one before if no update has any examples."""
        if not self._examples:
            return self._under_way.arrays
        divisor = self._examples / self._strategy.server_learning_rate
        return self.mean.added_to(self._under_way.arrays, divisor)


def _mean_of_metrics(contents: list[RecordDict], weighted_by_key: str) -> MetricRecord:
    """Average metrics over examples as Flower does, without replies that have 0 examples."""
    # Here, because Flower does not export it.
    from flwr.serverapp.strategy.strategy_utils import aggregate_metricrecords

    counted = [content for content in contents if weight_of(content, weighted_by_key)]
    return aggregate_metricrecords(counted, weighted_by_key) if counted else MetricRecord()
