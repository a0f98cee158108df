"""The rounds of a strategy on our grids: replies are summed as they arrive, and a run can be resumed."""

from __future__ import annotations

import base64
import io
import math
import random
import sys
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from logging import INFO
from typing import Any, Protocol, runtime_checkable

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from flower_gpu import frameworks
from flower_gpu.errors import ConfigError
from flower_gpu.flower.private_names import GENERATORS, find
from flower_gpu.strategies.strategy_state import OUR_FEDAVG, StrategyState, without_checkpoint
from flower_gpu.strategies.streaming import Configured

#: State of random number generators, made of JSON types.
RandomState = dict[str, Any]

Evaluate = Callable[[int, ArrayRecord], MetricRecord | None]


@dataclass
class RoundState:
    """The state of a run after a finished round."""

    server_round: int  # number of the round; 0 after the evaluation of the initial model
    arrays: ArrayRecord  # the global model
    # Metrics by round, of the clients' training and of server-side evaluation. These are the dictionaries of
    # the run itself, and later rounds add to them. A copy in each round would make rounds slower and slower.
    train_metrics: dict[int, MetricRecord]
    evaluate_metrics: dict[int, MetricRecord]
    random_state: RandomState  # result of :func:`capture_random_state`
    # Metrics of the clients' evaluation, by round; filled only by a strategy derived from ours
    client_metrics: dict[int, MetricRecord] = field(default_factory=dict)
    strategy: str = OUR_FEDAVG  # the only kind of strategy that can continue the run
    # State of a strategy of Flower; None if it cannot be written, so that the run cannot be resumed
    strategy_state: RecordDict | None = field(default_factory=RecordDict)
    first_model: str = ""  # :func:`shape_of` of the initial model, because a round may change the shape


@runtime_checkable
class ResumableGrid(Protocol):
    """A grid on which a run can be resumed: its methods besides the methods of Flower's ``Grid``."""

    def resumed(self) -> RoundState | None:
        """Return the round after which the run continues, or None to begin it."""
        ...

    def finished_round(self, state: RoundState) -> None:
        """Record a finished round. Called once for each round, including round 0."""
        ...


def keep_generator() -> None:
    """Reserve Python's generator for the app, and give Flower's heartbeats, retries and waits another.

    Their times are random, so with a shared generator the app's seed would not decide which clients are
    drawn.
    """
    for name in GENERATORS:
        if find(name) is random:
            module: Any = sys.modules[name.partition(":")[0]]
            module.random = random.Random()


def capture_random_state() -> RandomState:
    """Return the states of the global generators of Python, numpy and loaded frameworks, as JSON types."""
    version, numbers, gauss = random.getstate()
    framework_states = ((framework.name, framework.random_state()) for framework in frameworks.loaded())
    return {
        "python": [version, list(numbers), gauss],
        "numpy": _without_arrays(np.random.get_state(legacy=False)),
        "frameworks": {
            name: base64.b64encode(state).decode() for name, state in framework_states if state is not None
        },
    }


def restore_random_state(state: RandomState) -> None:
    """Restore the generators from :func:`capture_random_state`. Skip frameworks that are not loaded."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    np.random.set_state(state["numpy"])
    framework_states = state["frameworks"]
    for framework in frameworks.loaded():
        if framework.name in framework_states:
            framework.set_random_state(base64.b64decode(framework_states[framework.name]))


def shape_of(model: ArrayRecord) -> str:
    """Return a description of a model: number of arrays, number of elements, checksum of names and shapes."""
    shapes = [(name, array.dtype, tuple(array.shape)) for name, array in model.items()]
    numbers = sum(math.prod(shape) for _, _, shape in shapes)
    checksum = zlib.crc32(repr(shapes).encode())
    return f"{len(shapes)} arrays with {numbers} numbers (names and shapes {checksum:08x})"


def run(
    strategy: Strategy,
    grid: Grid,
    initial_arrays: ArrayRecord,
    num_rounds: int,
    timeout: float,
    train_config: ConfigRecord | None,
    evaluate_config: ConfigRecord | None,
    evaluate_fn: Evaluate | None,
    strategy_state: StrategyState | None = None,
    *,
    sums_replies: bool = False,
) -> Result:
    """Run the rounds as ``flwr.serverapp.strategy.Strategy.start`` does, on a :class:`ResumableGrid`.

    ``strategy``, ``grid``, ``initial_arrays``, ``num_rounds``, ``timeout``, ``train_config``,
    ``evaluate_config``, ``evaluate_fn``: as for ``Strategy.start``; ``grid`` is a :class:`ResumableGrid` as
    well. A resumed run ignores ``initial_arrays``, except that their shapes must match.
    ``strategy_state``: state of the strategy between rounds; None for our strategies, which have none.
    ``sums_replies``: whether the strategy only sums the replies to training, so that hosts may sum them.
    Returns the result of ``Strategy.start``; for a resumed run it includes the earlier rounds.
    Raises ConfigError if the run cannot be resumed with this strategy or this model.
    """
    # Imported here because Flower does not export it: no other code should depend on it.
    from flwr.serverapp.strategy.strategy_utils import log_strategy_start_info

    log(INFO, "Starting %s strategy:", type(strategy).__name__)
    log_strategy_start_info(num_rounds, initial_arrays, train_config, evaluate_config)
    strategy.summary()
    log(INFO, "")

    started = time.time()
    rounds = _RoundParts(strategy, grid, timeout, evaluate_fn, strategy_state, sums_replies)
    first = rounds.begin(initial_arrays, num_rounds)
    train_config = ConfigRecord() if train_config is None else train_config
    evaluate_config = ConfigRecord() if evaluate_config is None else evaluate_config
    for server_round in range(first, num_rounds + 1):
        log(INFO, "")
        log(INFO, "[ROUND %s/%s]", server_round, num_rounds)
        rounds.train(server_round, train_config)
        rounds.evaluate_on_clients(server_round, evaluate_config)
        rounds.evaluate_on_server(server_round)
        rounds.finish(server_round)

    for line in (
        "",
        f"Strategy execution finished in {time.time() - started:.2f}s",
        "",
        "Final results:",
        "",
    ):
        log(INFO, "%s", line)
    for line in io.StringIO(str(rounds.result)):
        log(INFO, "\t%s", line.strip("\n"))
    log(INFO, "")
    return rounds.result


@dataclass
class _RoundParts:
    """The parts of a round as methods, and the results so far."""

    strategy: Strategy
    grid: Any  # a Grid and ResumableGrid
    timeout: float
    evaluate_fn: Evaluate | None
    state: StrategyState | None
    sums_replies: bool
    result: Result = field(default_factory=Result)
    arrays: ArrayRecord = field(default_factory=ArrayRecord)
    first_model: str = ""  # shape_of() the initial model

    @property
    def kind(self) -> str:
        return OUR_FEDAVG if self.state is None else self.state.kind

    def begin(self, initial_arrays: ArrayRecord, num_rounds: int) -> int:
        """Evaluate the initial model, or restore the earlier run. Return the next round."""
        state: RoundState | None = self.grid.resumed()
        self.first_model = shape_of(initial_arrays)
        if state is None:
            self.arrays = initial_arrays
            if self.evaluate_fn:
                metrics = self.evaluate_fn(0, initial_arrays)
                log(INFO, "Initial global evaluation results: %s", metrics)
                if metrics is not None:
                    self.result.evaluate_metrics_serverapp[0] = metrics
            self.finish(0)
            return 1
        for name, previous, current in (
            ("strategy", state.strategy, self.kind),
            ("first model", state.first_model or self.first_model, self.first_model),
        ):
            if previous != current:
                raise ConfigError(
                    f"the run cannot continue: its {name} was {previous}, and is {current} now. Give the app "
                    f"the earlier one, or start a new run {without_checkpoint()}"
                )
        log(INFO, "Continuing after round %s of %s", state.server_round, num_rounds)
        self.arrays = state.arrays
        if state.server_round > 0:
            self.result.arrays = state.arrays
        self.result.train_metrics_clientapp = dict(state.train_metrics)
        self.result.evaluate_metrics_clientapp = dict(state.client_metrics)
        self.result.evaluate_metrics_serverapp = dict(state.evaluate_metrics)
        if self.state is not None and state.strategy_state:
            self.state.restore(state.strategy_state)
        restore_random_state(state.random_state)
        return state.server_round + 1

    def train(self, server_round: int, config: ConfigRecord) -> None:
        messages = self.strategy.configure_train(server_round, self.arrays, config, self.grid)
        if self.sums_replies:
            messages = Configured(messages)
        replies = self.grid.send_and_receive(messages, timeout=self.timeout)
        arrays, metrics = self.strategy.aggregate_train(server_round, replies)
        if arrays is not None:
            self.result.arrays = self.arrays = arrays
        self._note(server_round, metrics, self.result.train_metrics_clientapp)

    def evaluate_on_clients(self, server_round: int, config: ConfigRecord) -> None:
        messages = self.strategy.configure_evaluate(server_round, self.arrays, config, self.grid)
        replies = self.grid.send_and_receive(messages, timeout=self.timeout)
        metrics = self.strategy.aggregate_evaluate(server_round, replies)
        self._note(server_round, metrics, self.result.evaluate_metrics_clientapp)

    def evaluate_on_server(self, server_round: int) -> None:
        if not self.evaluate_fn:
            return
        log(INFO, "Global evaluation")
        metrics = self.evaluate_fn(server_round, self.arrays)
        log(INFO, "\t└──> MetricRecord: %s", metrics)
        if metrics is not None:
            self.result.evaluate_metrics_serverapp[server_round] = metrics

    def finish(self, server_round: int) -> None:
        self.grid.finished_round(
            RoundState(
                server_round=server_round,
                arrays=self.arrays,
                train_metrics=self.result.train_metrics_clientapp,
                evaluate_metrics=self.result.evaluate_metrics_serverapp,
                random_state=capture_random_state(),
                client_metrics=self.result.evaluate_metrics_clientapp,
                strategy=self.kind,
                strategy_state=RecordDict() if self.state is None else self.state.changed(),
                first_model=self.first_model,
            )
        )

    @staticmethod
    def _note(
        server_round: int, metrics: MetricRecord | None, metrics_of_rounds: dict[int, MetricRecord]
    ) -> None:
        if metrics is not None:
            log(INFO, "\t└──> Aggregated MetricRecord: %s", metrics)
            metrics_of_rounds[server_round] = metrics


def _without_arrays(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_arrays(item) for key, item in value.items()}
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value
