"""Rounds of a run for tests of checkpoints, each told by its number, and a check that one is complete."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, MetricRecord
from record_states import RecordStates
from record_strategies import filled, number_of

from flower_gpu.flower.resuming.checkpoint import Checkpoints
from flower_gpu.flower.rounds import RoundState, capture_random_state

PARTITIONS = 5


def round_state(number: int) -> RoundState:
    """The state after a round."""
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
    """The last round up to this one in which a node's state changed; 0: none."""
    return max((n for n in range(1, number + 1) if n % PARTITIONS == partition or n % 3 == 0), default=0)


def change_states(states: RecordStates, number: int) -> None:
    """Change the states that change in a round."""
    for partition in range(PARTITIONS):
        if number and last_change(partition, number) == number:
            states.put(partition, filled(number))


def check_complete(folder: Path) -> int:
    """Check that the checkpoint in a folder is all that of one round; returns the round, or -1."""
    states = RecordStates()
    found = Checkpoints(folder, states).read()
    if found is None:
        return -1
    check_equal(found, round_state(found.server_round))
    for partition in range(PARTITIONS):
        changed = last_change(partition, found.server_round)
        state = states.get(partition)
        assert (number_of(state) if state else 0) == changed, (partition, found.server_round)
    return found.server_round


def check_equal(found: RoundState, expected: RoundState) -> None:
    """Check that two rounds are the same, also in the order of the arrays, which are Flower's own."""
    assert found == expected
    # Only the bytes of Flower's own arrays are written once for all workers of the next round.
    assert {type(array) for array in found.arrays.values()} == {Array}
    assert list(found.arrays) == list(expected.arrays)
