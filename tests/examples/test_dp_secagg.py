"""examples/dp-secagg clips, masks and sums updates, and only training needs a worker."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from launched import REPOSITORY, Launch

APP = REPOSITORY / "examples" / "dp-secagg"

sys.path.insert(0, str(APP))

CLIENTS, ROUNDS, CLIPPING_NORM = 3, 1, 2.0
SETTINGS = {"local-epochs": 3, "batch-size": 32, "learning-rate": 0.3, "seed": 42}


def expected() -> list[dict[str, float]]:
    """Return the metrics of each round as if the server averaged the clipped models without noise."""
    # This import takes seconds, which would also delay the mere collection of tests.
    from dp_secagg import task

    weights = [np.zeros((10, 64), np.float32), np.zeros(10, np.float32)]
    metrics = []
    for server_round in range(1, ROUNDS + 1):
        updates, norms = [], []
        for client in range(CLIENTS):
            config = {**SETTINGS, "partition-id": client, "num-partitions": CLIENTS}
            trained, _, _ = task.Client(config).fit(weights, {"server-round": server_round})
            update = [after - before for after, before in zip(trained, weights, strict=True)]
            norms.append(np.sqrt(sum((array**2).sum() for array in update)))
            updates.append([array * min(1, CLIPPING_NORM / norms[-1]) for array in update])
        assert server_round > 1 or min(norms) > CLIPPING_NORM, "the updates are too small to be clipped"
        mean = [sum(arrays) / CLIENTS for arrays in zip(*updates, strict=True)]
        weights = [array + change for array, change in zip(weights, mean, strict=True)]
        metrics.append(task.evaluate(server_round, weights, {}))
    return metrics


@pytest.mark.e2e
@pytest.mark.timeout(1200)
def test_the_masked_sum_equals_the_plain_sum_and_only_training_needs_a_worker(launch: Launch) -> None:
    options = ("--start-method", "forkserver", "--clients", str(CLIENTS), "--rounds", str(ROUNDS))
    # The noise is small enough to predict the result.
    done = launch(APP, *options, "--run-config", "noise-multiplier=0.0001", timeout_s=1100)
    assert done.code == 0, done.output + done.logs()

    rounds = done.result["rounds"]
    assert [entry["round"] for entry in rounds] == [*range(1, ROUNDS + 1)]
    for actual, predicted in zip(rounds, expected(), strict=True):
        assert actual["loss"] == pytest.approx(predicted["loss"], abs=1e-3)
        assert actual["accuracy"] == pytest.approx(predicted["accuracy"], abs=0.01)
    assert rounds[-1]["accuracy"] > 0.5, "chance is 0.1"

    log = done.log("run")
    assert log.count("Secure aggregation completed.") == ROUNDS
    assert log.count("central DP noise with 0.0001 stdev added") == ROUNDS
    for client in range(CLIENTS):
        client_log = done.log(f"client-{client}")
        assert client_log.count("fixedclipping_mod: parameters are clipped by value: 2.0000") == ROUNDS
        assert client_log.count("Receiving: train message") == 4 * ROUNDS, "SecAgg+ has four stages"

    workers = [(event["client"], event["task"]) for event in done.events("worker_started")]
    trained = [(str(client), "train") for client in range(CLIENTS)] * ROUNDS
    assert sorted(workers) == sorted([*trained, *[("server", "evaluate")] * (ROUNDS + 1)])
