"""After a kill, resumable strategies continue on grids without checkpoints, such as Flower's own."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord
from flwr.server.strategy import FedAvg as OlderFedAvg
from flwr.serverapp import strategy as flowers
from flwr.serverapp.strategy import Result, Strategy
from flwr.supercore.heartbeat import HeartbeatSender
from kill_at_line import kill_at_line
from streaming_grid import PlainTestGrid, StreamingTestGrid

from flower_gpu import ConfigError, FedAvg, resumable
from flower_gpu.strategies import rounds
from flower_gpu.strategies.resuming import checkpoint
from flower_gpu.strategies.resuming import resumable as resuming
from flower_gpu.strategies.resuming.states import StateStore

NODES = range(1, 7)
OPTIONS = {"fraction_train": 0.5, "min_train_nodes": 3}
MAKERS: dict[str, Callable[[], Strategy]] = {
    "ours": lambda: FedAvg(**OPTIONS, exact_order=True),
    "with moments": lambda: flowers.FedAdam(**OPTIONS, fraction_evaluate=0.0),
}
FILES = (resuming.__file__, checkpoint.__file__, rounds.__file__)


def run(
    strategy: Strategy, folder: Path, num_rounds: int = 4, grid: Any = None, size: int = 3, seed: int = 3
) -> Result:
    """Run a strategy as a ServerApp does. The initial model and the sampled clients depend on the seed."""
    random.seed(seed)
    initial = ArrayRecord({"w": Array(np.full(size, random.random(), np.float32))})
    grid = PlainTestGrid(NODES) if grid is None else grid
    return resumable(strategy, folder).start(grid, initial, num_rounds=num_rounds)


def bits(result: Result) -> list[Any]:
    arrays = [(key, array.dtype, array.shape, array.data) for key, array in result.arrays.items()]
    return [arrays, {number: dict(record) for number, record in result.train_metrics_clientapp.items()}]


def killed(lines: int, function: Callable[[], object]) -> bool:
    """Call a function in a child process that is killed after ``lines`` lines of the code under test.

    Return False if the function ended first.
    """
    child = os.fork()
    if child == 0:
        try:
            kill_at_line(lines, FILES)
            function()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


@pytest.mark.parametrize("name", MAKERS)
def test_a_run_killed_at_any_line_ends_with_the_same_weights(name: str, tmp_path: Path) -> None:
    expected = bits(run(MAKERS[name](), tmp_path / "whole"))
    assert list(expected[1]) == [1, 2, 3, 4]
    folder, kills, seed = tmp_path / "killed", 0, 3
    for lines in range(60, 3000, 70):  # the first kill comes before the first checkpoint
        if not killed(lines, partial(run, MAKERS[name](), folder, seed=seed)):
            break
        kills += 1
        if checkpoint.Checkpoints(folder, StateStore()).read() is not None:
            seed = 99  # no effect, because the random state comes from the checkpoint
    assert kills > 5 and seed == 99
    assert bits(run(MAKERS[name](), folder, seed=seed)) == expected


def test_a_finished_run_returns_its_result_again_or_adds_rounds(tmp_path: Path) -> None:
    expected = bits(run(MAKERS["with moments"](), tmp_path / "one", 5))
    first = bits(run(MAKERS["with moments"](), tmp_path / "two", 3))
    assert bits(run(MAKERS["with moments"](), tmp_path / "two", 3)) == first
    assert bits(run(MAKERS["with moments"](), tmp_path / "two", 5)) == expected


def test_only_the_first_start_of_a_strategy_writes_checkpoints(tmp_path: Path) -> None:
    strategy = resumable(flowers.FedAvg(fraction_evaluate=0.0), tmp_path)
    initial = ArrayRecord({"w": Array(np.zeros(3, np.float32))})
    first = strategy.start(PlainTestGrid(NODES), initial, num_rounds=2)
    again = strategy.start(PlainTestGrid(NODES), initial, num_rounds=1)
    assert list(first.train_metrics_clientapp) == [1, 2] and list(again.train_metrics_clientapp) == [1]
    assert bits(run(flowers.FedAvg(fraction_evaluate=0.0), tmp_path, 2)) == bits(first)


def test_a_grid_with_checkpoints_keeps_its_own_too(tmp_path: Path) -> None:
    grid = StreamingTestGrid(NODES)
    full = run(MAKERS["ours"](), tmp_path / "one", grid=grid)
    assert [state.server_round for state in grid.finished] == [0, 1, 2, 3, 4]
    # The checkpoint with more finished rounds is used.
    behind = StreamingTestGrid(NODES, state=grid.finished[1])
    assert bits(run(MAKERS["ours"](), tmp_path / "one", grid=behind)) == bits(full) and not behind.finished
    ahead = StreamingTestGrid(NODES, state=grid.finished[3])
    assert bits(run(MAKERS["ours"](), tmp_path / "two", grid=ahead)) == bits(full)
    assert [state.server_round for state in ahead.finished] == [4]


@pytest.mark.parametrize(
    ("strategy", "size", "words"),
    [
        (flowers.FedYogi(fraction_evaluate=0.0), 3, "strategy was flwr.serverapp.strategy.FedAdam, and is"),
        (
            FedAvg(),
            3,
            "is flower_gpu.FedAvg now.* or start a new run in another folder$",
        ),
        (flowers.FedAdam(), 4, "first model was 1 arrays with 3 numbers .*, and is 1 arrays with 4 numbers"),
    ],
)
def test_another_strategy_or_model_is_refused(
    strategy: Strategy, size: int, words: str, tmp_path: Path
) -> None:
    run(MAKERS["with moments"](), tmp_path, 1)
    files_before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ConfigError, match=words):
        run(strategy, tmp_path, 2, size=size)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == files_before


def test_flowers_heartbeats_do_not_use_the_random_generator_of_the_app(tmp_path: Path) -> None:
    resumable(FedAvg(), tmp_path)
    sent: list[bool] = []

    def send() -> bool:
        sender._stop_event.set()  # ends the loop after one random waiting time
        sent.append(True)
        return True

    sender = HeartbeatSender(send)
    state_before = random.getstate()
    sender._run()
    assert sent and random.getstate() == state_before


class Derived(flowers.FedAvg):
    """A subclass, which may keep any state."""


class OwnStart(Derived):
    """A subclass that declares its state, but overrides ``start``, so it may do anything between rounds."""

    def start(self, *args: Any, **kwargs: Any) -> Any:
        return super().start(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


@pytest.mark.parametrize("strategy", [Derived, OwnStart])
def test_strategies_that_cannot_be_resumed_are_refused_before_they_start(
    strategy: type[Derived], tmp_path: Path
) -> None:
    name = strategy.__name__
    with pytest.raises(ConfigError, match=f"cannot be used with {name}, because its state is not known"):
        resumable(strategy(), tmp_path)
    with pytest.raises(TypeError, match=r"this is a flwr\.server\.strategy\.fedavg\.FedAvg: the older API"):
        resumable(OlderFedAvg(), tmp_path)  # type: ignore[type-var]
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"/file\): File exists. Give a folder that this account can make"):
        resumable(FedAvg(), tmp_path / "file")


def test_a_folder_in_use_by_another_run_is_refused(tmp_path: Path) -> None:
    class Grid(PlainTestGrid):
        def get_node_ids(self) -> list[int]:
            with pytest.raises(ConfigError, match="another process continues the run in"):
                run(MAKERS["ours"](), tmp_path)
            return super().get_node_ids()

    run(MAKERS["ours"](), tmp_path, 1, Grid(NODES))
