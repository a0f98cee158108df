"""FedBuff: every few updates make the next version of the model, so no client waits for another.

::

    configure_train ──> UnderWay ──> aggregate_train ──> configure_evaluate
    a message for       messages     the sum of the      the new version goes
    each free slot      and replies  updates             to free slots

Each round makes a version. The loop is in :mod:`flower_gpu.strategies.rounds`.
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
from flower_gpu.flower.records import ROUND_KEY
from flower_gpu.kinds import COUNT, POSITIVE
from flower_gpu.strategies import rounds, streaming
from flower_gpu.strategies.averaging import ReplySum, weight_of
from flower_gpu.strategies.strategy import FedAvg
from flower_gpu.strategies.under_way import UnderWay


def inverse_root(rounds_behind: int) -> float:
    """Return the weight of an update that is ``rounds_behind`` rounds behind, as in the paper."""
    return 1 / math.sqrt(1 + rounds_behind)


class FedBuff(FedAvg):
    """Buffered asynchronous aggregation for the Message API: no round waits for slow clients.

    FedBuff (Nguyen et al., 2022, https://arxiv.org/abs/2106.06639). When a client is done, another client
    without a message is drawn and gets the newest model at once. An update is the difference between the
    model that a client returns and the model that it was sent. A round ends when ``buffer_size`` updates have
    made the next version::

        model += server_learning_rate * sum(examples * staleness * update) / sum(examples)

    Arrays keep their dtype of the initial model. An update with 0 examples does not change the model.

    The server evaluates as for :class:`FedAvg`, and ``start`` has the same parameters. ``timeout`` applies to
    each message separately: the number of seconds until its client counts as failed. In a simulation, time
    during which no worker can have a lease does not count. A failed client is not drawn again for this
    version. At the end the run does not wait for clients that still train.

    Parameters
    ----------
    buffer_size : int
        Number of updates that make the next version.
    concurrency : int
        Number of clients that train at a time. It should exceed the number of workers, so that each worker
        always has work.
    staleness : callable, optional
        Weight of an update by the number of rounds that it is behind: ``int -> float``, 0 or more. Default:
        ``1 / sqrt(1 + rounds_behind)``.
    server_learning_rate : float
        Factor applied to the mean update.
    min_available_nodes : int, optional
        Number of nodes that must be connected at the start; ``concurrency`` by default.
    weighted_by_key, arrayrecord_key, configrecord_key, train_metrics_aggr_fn
        As for :class:`FedAvg`.
    exact_order : bool
        Consume replies in the order of a virtual clock, even if that means waiting, so that a run can be
        repeated. ``flower-gpu simulate --deterministic`` always does so.

    Raises
    ------
    ConfigError, TypeError
        If a value is invalid.
    ClientsFailedError
        By ``start``, if no message of a round could be sent, or if no client sent an update in any round.
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
        """Return the weight of an update that is ``rounds_behind`` rounds behind, checked."""
        value = self.staleness(rounds_behind) if callable(self.staleness) else None
        if not (isinstance(value, int | float) and 0 <= value < math.inf):
            raise ConfigError(
                "FedBuff: staleness must be a function of how many rounds an update is behind that returns a "
                f"number, 0 or more; for {rounds_behind} there is {value!r}"
            )
        return value

    def summary(self) -> None:
        """Log the number of updates in a round and of clients that train at a time."""
        log(INFO, "\t└──> %d updates make a round, %d clients train", self.buffer_size, self.concurrency)

    def _run(self, grid: Grid, initial_arrays: ArrayRecord, *arguments: Any) -> Result:
        *rest, evaluate_fn = arguments
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
            under_way.cancel_all()

    @property
    def checkpoint_kind(self) -> str:
        """Name of the strategies that can resume from a checkpoint of this strategy."""
        return "flower_gpu.FedBuff"

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return a message for each free slot. Also called during a round."""
        if not isinstance(grid, UnderWay):
            raise ConfigError("FedBuff has a loop of its own: call its start(), not another strategy's")
        # A copy, because messages of this round may be read after the next round has begun.
        config = ConfigRecord({**config, ROUND_KEY: server_round})
        record = RecordDict({self.arrayrecord_key: arrays, self.configrecord_key: config})
        return self._construct_messages(record, grid.next_nodes(), MessageType.TRAIN)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Return the next version of the model. Updates are summed as they arrive; see :class:`FedAvg`."""
        return streaming.aggregate(self, replies, _UpdateSum(self, self._under_way, server_round))

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return no messages. Free slots start to train the new version before the server evaluates it."""
        self._under_way.go_on_with(arrays, server_round + 1)
        return []


class _UpdateSum(ReplySum):
    """The weighted sum of updates, and the new model that results from the previous version.

    Each update is the difference between the reply and the model that its client was sent.
    """

    def __init__(self, strategy: FedBuff, under_way: UnderWay, server_round: int) -> None:
        super().__init__(strategy.weighted_by_key)
        self._strategy = strategy
        self._under_way = under_way
        self._round = server_round
        self._examples = 0.0

    def add(self, reply: Message, source: str | None = None) -> None:
        """Add the update in a reply."""
        super().add(reply, source or self._under_way.name_of(reply.metadata.src_node_id))

    def _add(self, reply: Message, record: ArrayRecord, weight: float, source: str) -> None:
        sent = self._under_way.to_sum.pop(reply.metadata.reply_to_message_id)
        base_model = cast(ArrayRecord, sent.content[self._strategy.arrayrecord_key])
        if record.keys() != base_model.keys():
            self._has_misfit(f"The reply of {source} has other arrays than the client was sent.")
            return
        if not 0 <= weight < math.inf:
            key = self._strategy.weighted_by_key
            self._has_misfit(f"The reply of {source} has {weight} for {key!r}, which must be 0 or more.")
            return
        factor = weight * self._strategy.counts(self._round - sent.server_round)
        self._examples += weight
        # An update of weight 0 is skipped, because 0 times an infinite value would be NaN.
        if factor:
            self.mean.add(record, factor, source, base_model)

    def finish(self) -> ArrayRecord:
        """Return the next version of the model, or the previous version if no update has examples."""
        if not self._examples:
            return self._under_way.arrays
        divisor = self._examples / self._strategy.server_learning_rate
        return self.mean.added_to(self._under_way.arrays, divisor)


def _mean_of_metrics(contents: list[RecordDict], weighted_by_key: str) -> MetricRecord:
    """Return the metrics averaged over examples as in Flower, without replies that have 0 examples."""
    # Imported here because Flower does not export it: no other code should depend on it.
    from flwr.serverapp.strategy.strategy_utils import aggregate_metricrecords

    counted = [content for content in contents if weight_of(content, weighted_by_key)]
    return aggregate_metricrecords(counted, weighted_by_key) if counted else MetricRecord()
