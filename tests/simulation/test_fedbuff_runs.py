"""FedBuff in `flower-gpu simulate`: identical bits with any workers and after a kill, and its reports."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid
from recorded_apps import Clients, initial_arrays, new_nodes, run_app
from simulations import Simulation, run, running, wait_for_line

from flower_gpu import FedBuff

pytestmark = pytest.mark.timeout(300)
pytest.importorskip("torch")

NODES, ROUNDS, UPDATES, CONCURRENCY = 6, 4, 3, 4
CONFIG = f"strategy='fedbuff' num-server-rounds={ROUNDS}"


@pytest.fixture(scope="module")
def devices(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A table in which half of the clients are slow."""
    path = tmp_path_factory.mktemp("devices") / "devices.toml"
    path.write_text('["*/2"]\nslow-down = 3\n')
    return str(path)


def test_the_model_is_the_same_with_other_workers_and_after_a_kill(devices: str, tmp_path: Path) -> None:
    """Messages in flight at a checkpoint are sent again, with their models, seeds and client states."""
    options = ("--seed", "3", "--deterministic", "--clients-table", devices)
    alone = run("exact", NODES, tmp_path / "alone", *options, "--max-workers", "1", "--run-config", CONFIG)
    assert alone.status == 0, alone.output
    (train,) = {(part.messages, part.failed) for part in alone.parts("train")}
    assert train == (UPDATES, 0) and len(alone.parts("train")) == ROUNDS
    assert alone.summary["messages"] == ROUNDS * UPDATES and alone.summary["failed"] == 0
    assert f"{CONCURRENCY - 1} updates are still in flight and will not be used" in alone.output

    runs, rounds = tmp_path / "runs", tmp_path / "rounds"
    rounds.mkdir()
    # Later rounds wait for their files.
    for number in ("1", "2"):
        (rounds / number).touch()
    config = f"{CONFIG} waits-for='{rounds}'"
    with running("exact", NODES, runs, *options, "--max-workers", "4", "--run-config", config) as process:
        wait_for_line(process, "round 2/4")
        os.kill(process.pid, signal.SIGKILL)
        process.wait(60)
    for number in ("3", "4"):
        (rounds / number).touch()
    (folder,) = runs.iterdir()
    other = run("exact", NODES, runs, "--resume", str(folder), "--run-config", "strategy='ours'")
    assert other.status == 2 and "its checkpoint is one of flower_gpu.FedBuff" in other.output
    done = run("exact", NODES, runs, "--max-workers", "3", "--calls-per-worker", "9", "--resume", str(folder))
    assert done.status == 0 and "Continuing after round" in done.output
    assert model_of(done) == model_of(alone)


def test_the_duration_of_a_round_starts_at_the_end_of_the_previous_round() -> None:
    """The replies of a round arrive during the evaluation, before the strategy starts the round."""
    evaluation_s = 0.3

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        time.sleep(evaluation_s)
        return MetricRecord({"accuracy": 0.5})

    def main(grid: Grid, context: Context) -> None:
        FedBuff(2, 4).start(grid, initial_arrays(), num_rounds=3, evaluate_fn=evaluate)

    recorded = run_app(main, handle=Clients(new_nodes(), has_failing=False))
    rounds = recorded.phases("train")
    assert [phase.messages for phase in rounds] == [2, 2, 2]
    assert all(phase.seconds >= evaluation_s for phase in rounds[1:])


def model_of(done: Simulation) -> str:
    digest: str = done.summary["model_sha256"]
    return digest


def test_a_run_without_order_counts_clients_that_fail(tmp_path: Path) -> None:
    """A client whose worker was killed counts as failed, and the round continues without it."""
    killed = tmp_path / "killed"
    done = run(
        "exact", NODES, tmp_path / "runs", "--run-config", f"{CONFIG} dies-once='{killed}'", "--seed", "3"
    )
    assert done.status == 0, done.output
    assert done.summary["failed"] == 1 and done.summary["messages"] == ROUNDS * UPDATES + 1


def test_a_concurrency_above_the_number_of_clients_is_an_error(tmp_path: Path) -> None:
    done = run("exact", CONCURRENCY - 1, tmp_path, "--run-config", CONFIG)
    assert done.status == 2, done.output
    assert "waits for 4 nodes, and there are 3" in done.output and "concurrency" in done.output
