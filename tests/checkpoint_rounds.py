"""Rounds of a run for tests of checkpoints, and a check that a checkpoint is complete."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, MetricRecord
from record_states import RecordStates
from record_strategies import filled, number_of

from flower_gpu.strategies.resuming.checkpoint import Checkpoints
from flower_gpu.strategies.rounds import RoundState, capture_random_state

PARTITIONS = 5


def round_state(number: int) -> RoundState:
    """Return the state after a round."""
    random.seed(number)
    np.random.seed(number)
    return RoundState(
        server_round=number,
        arrays=ArrayRecord({key: Array(np.full(2000, number + n)) for n, key in enumerate("zab")}),
        train_metrics={n: MetricRecord({"loss": 1 / n, "all": [n, n]}) for n in range(1, number + 1)},
        evaluate_metrics={n: MetricRecord({"accuracy": n / 7}) for n in range(number + 1)},
        client_metrics={n: MetricRecord({"auc": n / 3}) for n in range(1, number + 1, 2)},
        random_state=capture_random_state(),
        strategy="flwr.serverapp.strategy.FedAdam",
        strategy_state=filled(number),
    )


def last_change(partition: int, number: int) -> int:
    """Return the last round, up to this number, in which a node's state changed, or 0."""
    return max((n for n in range(1, number + 1) if n % PARTITIONS == partition or n % 3 == 0), default=0)


def change_states(states: RecordStates, number: int) -> None:
    """Change the states that change in a round."""
    for partition in range(PARTITIONS):
        if number and last_change(partition, number) == number:
            states.put(partition, filled(number))


def check_complete(folder: Path) -> int:
    """Check that the checkpoint in a folder is that of a single round. Return the round, or -1."""
    states = RecordStates()
    restored = Checkpoints(folder, states).read()
    if restored is None:
        return -1
    check_equal(restored, round_state(restored.server_round))
    for partition in range(PARTITIONS):
        changed = last_change(partition, restored.server_round)
        state = states.get(partition)
        assert (number_of(state) if state else 0) == changed, (partition, restored.server_round)
    return restored.server_round


def check_equal(restored: RoundState, expected: RoundState) -> None:
    """Check that two rounds are equal, including the order of the arrays, and that these are Flower's own."""
    assert restored == expected
    # For the next round, only the bytes of Flower's own arrays are written once for all workers.
    assert {type(array) for array in restored.arrays.values()} == {Array}
    assert list(restored.arrays) == list(expected.arrays)
