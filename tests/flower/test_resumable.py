"""Strategies on a grid without checkpoints, such as Flower's own, that go on where a process was killed."""

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
from flower_gpu.flower import rounds
from flower_gpu.flower.resuming import checkpoint
from flower_gpu.flower.resuming import resumable as resuming
from flower_gpu.flower.resuming.states import StateStore

NODES = range(1, 7)
SOME = {"fraction_train": 0.5, "min_train_nodes": 3}
MAKE: dict[str, Callable[[], Strategy]] = {
    "ours": lambda: FedAvg(**SOME, exact_order=True),
    "with moments": lambda: flowers.FedAdam(**SOME, fraction_evaluate=0.0),
}
CODE = (resuming.__file__, checkpoint.__file__, rounds.__file__)


def run(
    strategy: Strategy, folder: Path, num_rounds: int = 4, grid: Any = None, size: int = 3, seed: int = 3
) -> Result:
    """Run what a ServerApp does; its initial model, and the clients that it asks, depend on the seed."""
    random.seed(seed)
    initial = ArrayRecord({"w": Array(np.full(size, random.random(), np.float32))})
    grid = PlainTestGrid(NODES) if grid is None else grid
    return resumable(strategy, folder).start(grid, initial, num_rounds=num_rounds)


def bits(result: Result) -> list[Any]:
    arrays = [(key, array.dtype, array.shape, array.data) for key, array in result.arrays.items()]
    return [arrays, {number: dict(each) for number, each in result.train_metrics_clientapp.items()}]


def killed(lines: int, then: Callable[[], object]) -> bool:
    """Do this in a process that is killed before so many lines are run; tell whether that was so."""
    child = os.fork()
    if child == 0:
        try:
            kill_at_line(lines, CODE)
            then()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


@pytest.mark.parametrize("name", MAKE)
def test_killed_at_any_moment_it_ends_with_the_same_bits(name: str, tmp_path: Path) -> None:
    wanted = bits(run(MAKE[name](), tmp_path / "whole"))
    assert list(wanted[1]) == [1, 2, 3, 4]
    folder, kills, seed = tmp_path / "killed", 0, 3
    for lines in range(60, 3000, 70):  # from before the first checkpoint on; each start does what it can
        if not killed(lines, partial(run, MAKE[name](), folder, seed=seed)):
            break
        kills += 1
        if checkpoint.Checkpoints(folder, StateStore()).read() is not None:
            seed = 99  # all that is drawn comes from the checkpoint
    assert kills > 5 and seed == 99
    assert bits(run(MAKE[name](), folder, seed=seed)) == wanted


def test_a_run_that_is_over_gives_its_result_again_or_does_more_rounds(tmp_path: Path) -> None:
    wanted = bits(run(MAKE["with moments"](), tmp_path / "one", 5))
    first = bits(run(MAKE["with moments"](), tmp_path / "two", 3))
    assert bits(run(MAKE["with moments"](), tmp_path / "two", 3)) == first
    assert bits(run(MAKE["with moments"](), tmp_path / "two", 5)) == wanted


def test_only_the_first_start_of_a_strategy_has_checkpoints(tmp_path: Path) -> None:
    strategy = resumable(flowers.FedAvg(fraction_evaluate=0.0), tmp_path)
    initial = ArrayRecord({"w": Array(np.zeros(3, np.float32))})
    first = strategy.start(PlainTestGrid(NODES), initial, num_rounds=2)
    again = strategy.start(PlainTestGrid(NODES), initial, num_rounds=1)
    assert list(first.train_metrics_clientapp) == [1, 2] and list(again.train_metrics_clientapp) == [1]
    assert bits(run(flowers.FedAvg(fraction_evaluate=0.0), tmp_path, 2)) == bits(first)


def test_a_grid_with_checkpoints_keeps_them_as_well(tmp_path: Path) -> None:
    grid = StreamingTestGrid(NODES)
    whole = run(MAKE["ours"](), tmp_path / "one", grid=grid)
    assert [state.server_round for state in grid.finished] == [0, 1, 2, 3, 4]
    # Whoever knows more rounds is right.
    behind = StreamingTestGrid(NODES, state=grid.finished[1])
    assert bits(run(MAKE["ours"](), tmp_path / "one", grid=behind)) == bits(whole) and not behind.finished
    ahead = StreamingTestGrid(NODES, state=grid.finished[3])
    assert bits(run(MAKE["ours"](), tmp_path / "two", grid=ahead)) == bits(whole)
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
    run(MAKE["with moments"](), tmp_path, 1)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ConfigError, match=words):
        run(strategy, tmp_path, 2, size=size)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_flowers_heartbeats_do_not_draw_from_the_generator_of_the_app(tmp_path: Path) -> None:
    resumable(FedAvg(), tmp_path)
    sent: list[bool] = []

    def send() -> bool:
        sender._stop_event.set()  # it draws how long it waits, and ends
        sent.append(True)
        return True

    sender = HeartbeatSender(send)
    before = random.getstate()
    sender._run()
    assert sent and random.getstate() == before


class Derived(flowers.FedAvg):
    """May keep anything."""


class OwnStart(Derived):
    """Says what its state is, and may do anything between rounds."""

    def start(self, *args: Any, **kwargs: Any) -> Any:
        return super().start(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


@pytest.mark.parametrize("strategy", [Derived, OwnStart])
def test_what_cannot_go_on_is_refused_before_it_starts(strategy: type[Derived], tmp_path: Path) -> None:
    what = strategy.__name__
    with pytest.raises(ConfigError, match=f"cannot be used with {what}, because its state is not known"):
        resumable(strategy(), tmp_path)
    with pytest.raises(TypeError, match=r"this is a flwr\.server\.strategy\.fedavg\.FedAvg: the older API"):
        resumable(OlderFedAvg(), tmp_path)  # type: ignore[type-var]
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"/file\): File exists. Give a folder that this account can make"):
        resumable(FedAvg(), tmp_path / "file")


def test_a_folder_that_another_run_uses_is_refused(tmp_path: Path) -> None:
    class Grid(PlainTestGrid):
        def get_node_ids(self) -> list[int]:
            with pytest.raises(ConfigError, match="another process continues the run in"):
                run(MAKE["ours"](), tmp_path)
            return super().get_node_ids()

    run(MAKE["ours"](), tmp_path, 1, Grid(NODES))
