"""Flower's own strategies resume after any round with identical results; others have no checkpoint."""

from __future__ import annotations

import gc
import json
import random
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import strategy as flowers
from flwr.serverapp.strategy import FedAdam, FedAvg, Result, Strategy
from flwr.supercore.differential_privacy import KEY_NORM_BIT
from recorded_apps import Recorded, new_nodes, run_app

import flower_gpu
from flower_gpu.errors import ConfigError
from flower_gpu.flower import record_bytes
from flower_gpu.options import RUN_DIR_VARIABLE
from flower_gpu.strategies.resuming.checkpoint import Checkpoints
from flower_gpu.strategies.resuming.states import StateStore
from flower_gpu.strategies.rounds import RoundState
from flower_gpu.strategies.strategy_state import kind_of, state_of

NODES = 5
ROUNDS = 3
SOME: Any = {"fraction_train": 0.6, "min_train_nodes": 3}


class Accountant:
    """A stand-in for Flower's ``PrivacyAccountant``, which a user may pass. It sums the released events."""

    class config:  # noqa: N801
        sampling_method = flowers.dp_fixed_clipping.SamplingMethod.NO_AMPLIFICATION
        population_size = NODES
        max_epsilon = None

    def __init__(self) -> None:
        self.spent: list[float] = []

    def compose(self, event: Any, count: int = 1) -> None:
        self.spent.append(event.noise_multiplier)

    def get_privacy_spent(self) -> Any:
        return flowers.dp_fixed_clipping.PrivacySpent(sum(self.spent), 0.1, len(self.spent), "sum")

    def state_dict(self) -> dict[str, object]:
        return {"spent": tuple(self.spent), "version": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert isinstance(state["spent"], tuple) and state["version"] == 1
        self.spent = list(state["spent"])


MAKE: dict[str, Callable[[], Strategy]] = {
    "Bulyan": flowers.Bulyan,
    "DifferentialPrivacyClientSideAdaptiveClipping": lambda: (
        flowers.DifferentialPrivacyClientSideAdaptiveClipping(FedAdam(), 0.3, NODES)
    ),
    "DifferentialPrivacyClientSideFixedClipping": lambda: flowers.DifferentialPrivacyClientSideFixedClipping(
        FedAvg(), 0.3, 2.0, NODES, accountant=Accountant()
    ),
    "DifferentialPrivacyServerSideAdaptiveClipping": lambda: (
        flowers.DifferentialPrivacyServerSideAdaptiveClipping(FedAvg(), 0.3, NODES)
    ),
    "DifferentialPrivacyServerSideFixedClipping": lambda: flowers.DifferentialPrivacyServerSideFixedClipping(
        flowers.FedAvgM(server_momentum=0.5), 0.3, 2.0, NODES
    ),
    "FedAdagrad": lambda: flowers.FedAdagrad(**SOME),
    "FedAdam": lambda: flowers.FedAdam(**SOME),
    "FedAvg": lambda: FedAvg(**SOME),
    "FedAvgM": lambda: flowers.FedAvgM(server_momentum=0.9, server_learning_rate=0.5, **SOME),
    "FedMedian": lambda: flowers.FedMedian(**SOME),
    "FedProx": lambda: flowers.FedProx(proximal_mu=0.1, **SOME),
    "FedTrimmedAvg": lambda: flowers.FedTrimmedAvg(beta=0.2, **SOME),
    "FedXgbBagging": lambda: flowers.FedXgbBagging(**SOME),
    "FedXgbCyclic": flowers.FedXgbCyclic,
    "FedYogi": lambda: flowers.FedYogi(**SOME),
    "Krum": lambda: flowers.Krum(num_malicious_nodes=1, **SOME),
    "MultiKrum": lambda: flowers.MultiKrum(num_malicious_nodes=1, num_nodes_to_select=2),
    "QFedAvg": lambda: flowers.QFedAvg(client_learning_rate=0.1, **SOME),
}
# : Strategies whose next round needs more than the model.
NEED_STATE = {
    "DifferentialPrivacyClientSideAdaptiveClipping",
    "DifferentialPrivacyServerSideAdaptiveClipping",
    # It wraps FedAvgM.
    "DifferentialPrivacyServerSideFixedClipping",
    "FedAdagrad",
    "FedAdam",
    "FedAvgM",
    "FedXgbCyclic",
    "FedYogi",
}
CLASSES = [name for name in flowers.__all__ if name not in ("Result", "Strategy")]


def tree(number: int) -> bytes:
    """Return an XGBoost model with a single tree, with the fields that Flower reads."""
    sizes = {"num_trees": "1", "num_parallel_tree": "1"}
    model = {"gbtree_model_param": sizes, "iteration_indptr": [0, 1], "tree_info": [0]}
    model["trees"] = [{"id": 0, "number": number}]
    return json.dumps({"learner": {"gradient_booster": {"model": model}}}).encode()


def initial_arrays(name: str) -> ArrayRecord:
    if "Xgb" in name:
        return ArrayRecord([np.frombuffer(tree(0), np.uint8)])
    arrays = {"w": np.zeros((3, 2), np.float32), "scale": np.ones((), np.float64)}
    return ArrayRecord({key: Array(array) for key, array in arrays.items()})


class Trainers:
    """Clients that change the model only by values that depend on client, round and model."""

    def __init__(self, nodes: Any, name: str) -> None:
        self._nodes = nodes
        self._is_xgb = "Xgb" in name

    def __call__(self, message: Message) -> Message:
        partition = self._nodes.partition_of(message.metadata.dst_node_id)
        config = message.content["config"]
        metrics = {"num-examples": 2, "train_loss": 1 / (1 + partition), KEY_NORM_BIT: partition % 2}
        if norm := config.get("clipping_norm"):
            metrics["norm"] = norm
        content = RecordDict({"metrics": MetricRecord(metrics)})
        if message.metadata.message_type == "train":
            content["arrays"] = self._trained(partition, config["server-round"], message.content["arrays"])
        return Message(content, reply_to=message)

    def _trained(self, partition: int, server_round: int, arrays: ArrayRecord) -> ArrayRecord:
        if self._is_xgb:
            return ArrayRecord([np.frombuffer(tree(10 * server_round + partition), np.uint8)])
        steps = np.random.RandomState(100 * server_round + partition)
        return ArrayRecord(
            {
                key: Array(
                    np.asarray(0.9 * array.numpy() + steps.normal(size=array.shape)).astype(array.dtype)
                )
                for key, array in arrays.items()
            }
        )


class Unresumable:
    """A grid without checkpoints, like Flower's own: strategies run their own ``start`` on it."""

    def __init__(self, grid: Any) -> None:
        self._grid = grid

    def __getattr__(self, name: str) -> Any:
        if name in ("resumed", "finished_round"):
            raise AttributeError(name)
        return getattr(self._grid, name)


class Copied(Checkpoints):
    """Keeps a copy of the folder after each round, as a run killed at that time would have left it."""

    def write(self, state: RoundState) -> None:
        super().write(state)
        folder = self._index.parent
        shutil.copytree(folder, folder.with_name(str(state.server_round)))


def total(server_round: int, arrays: ArrayRecord) -> MetricRecord:
    return MetricRecord({"sum": float(sum(array.numpy().sum(dtype=float) for array in arrays.values()))})


def run(
    name: str, strategy: Strategy, folder: Path, kind: type[Checkpoints] = Checkpoints, **options: Any
) -> tuple[Result, RoundState | None, Recorded]:
    """Run a strategy from the folder's checkpoint. Return its result, last checkpoint and record."""
    states = StateStore()
    checkpoints = kind(folder, states)
    resumed = checkpoints.read()
    if resumed is not None and options.pop("forgets", False):
        resumed = replace(resumed, strategy_state=RecordDict())
    random.seed(7 if resumed is None else 99)
    np.random.seed(7 if resumed is None else 99)
    evaluate_fn = options.pop("evaluate_fn", total)
    streams = options.get("streams", True)
    results: list[Result] = []

    def main(grid: Any, context: Any) -> None:
        config = ConfigRecord({"lr": 0.1})
        grid = grid if streams else Unresumable(grid)
        results.append(
            strategy.start(grid, initial_arrays(name), ROUNDS, train_config=config, evaluate_fn=evaluate_fn)
        )

    nodes = new_nodes(NODES)
    handle = Trainers(nodes, name)
    recorded = run_app(main, handle, nodes, 1, checkpoints=checkpoints, resumed=resumed, **options)
    return results[0], Checkpoints(folder, StateStore()).read(), recorded


def bits(result: Result) -> list[Any]:
    """Return all parts of a result, with the bytes of its arrays."""
    arrays = [(key, array.dtype, array.shape, array.data) for key, array in result.arrays.items()]
    metrics = (
        result.train_metrics_clientapp,
        result.evaluate_metrics_clientapp,
        result.evaluate_metrics_serverapp,
    )
    return [arrays, *({number: dict(record) for number, record in each.items()} for each in metrics)]


@pytest.fixture(scope="module", autouse=True)
def no_old_garbage() -> Iterator[None]:
    """Freeze existing objects, because Flower's QFedAvg and Bulyan collect garbage for each reply."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.parametrize("name", CLASSES)
def test_each_of_flowers_strategies_resumes_after_any_round_with_identical_bits(
    name: str, tmp_path: Path
) -> None:
    expected, last, _ = run(name, MAKE[name](), tmp_path / "whole", Copied)
    assert last is not None and last.server_round == ROUNDS
    assert last.strategy.startswith(f"flwr.serverapp.strategy.{name}")
    shutil.copytree(tmp_path / "1", tmp_path / "forgotten")
    for ended_after in range(ROUNDS + 1):
        resumed, again, _ = run(name, MAKE[name](), tmp_path / str(ended_after))
        assert bits(resumed) == bits(expected), ended_after
        assert again == last, ended_after
    resumed, again, _ = run(name, MAKE[name](), tmp_path / "forgotten", forgets=True)
    assert (bits(resumed) != bits(expected)) == (name in NEED_STATE)
    # The strategies with "Fixed" in their name have an accountant.
    assert (again != last) == (name in NEED_STATE or "Fixed" in name)


@pytest.mark.parametrize("name", ["DifferentialPrivacyServerSideFixedClipping", "FedMedian", "QFedAvg"])
def test_rounds_match_those_of_flowers_own_start(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Results are bit-identical and logs line-identical if replies are not summed here."""
    outcomes = []
    for streams in (True, False):
        caplog.clear()
        result, last, recorded = run(name, MAKE[name](), tmp_path / str(streams), streams=streams)
        lines = [re.sub(r"\d+\.\d+s$", "", record.getMessage()) for record in caplog.records]
        events = [(event["event"], event.get("round"), event.get("metrics")) for event in recorded.events]
        outcomes.append((bits(result), lines, events, recorded.recorder.model))
        assert (last is not None) == streams
    assert outcomes[0] == outcomes[1]
    assert f"[ROUND {ROUNDS}/{ROUNDS}]" in outcomes[0][1]


class WithMomentum:
    """Adds momentum to a FedAvg, and defines its own state."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.momentum: dict[str, Any] = {}

    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        arrays, metrics = super().aggregate_train(server_round, replies)  # type: ignore[misc]
        for key, array in arrays.items():
            self.momentum[key] = 0.5 * self.momentum.get(key, 0) + array.numpy()
        return ArrayRecord({key: Array(np.asarray(value)) for key, value in self.momentum.items()}), metrics

    def state_dict(self) -> dict[str, Any]:
        return {"momentum": self.momentum}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.momentum = state["momentum"]


class FlowersWithMomentum(WithMomentum, FedAvg):
    """Derives from Flower's FedAvg."""


class OursWithMomentum(WithMomentum, flower_gpu.FedAvg):
    """Derives from flower_gpu's FedAvg, which runs its rounds differently."""


OPTED_IN: dict[str, Callable[[], Strategy]] = {
    "derived from Flower's": FlowersWithMomentum,
    "derived from ours": OursWithMomentum,
    "inside a wrapper": lambda: flowers.DifferentialPrivacyServerSideFixedClipping(
        FlowersWithMomentum(), 0.3, 2.0, NODES
    ),
}


@pytest.mark.parametrize("kind", OPTED_IN)
def test_a_strategy_with_a_state_dict_resumes_after_any_round_with_identical_bits(
    kind: str, tmp_path: Path
) -> None:
    expected, last, recorded = run("", OPTED_IN[kind](), tmp_path / "whole", Copied, evaluate_fn=None)
    assert last is not None and "WithMomentum" in last.strategy
    (started,) = recorded.of("strategy_started")
    assert "WithMomentum" in str(started.resumes), "a run with another strategy may not go on with it"
    shutil.copytree(tmp_path / "1", tmp_path / "forgotten")
    for ended_after in range(ROUNDS):
        resumed, again, _ = run("", OPTED_IN[kind](), tmp_path / str(ended_after), evaluate_fn=None)
        assert bits(resumed) == bits(expected), ended_after
        assert again == last, ended_after
    resumed, _, _ = run("", OPTED_IN[kind](), tmp_path / "forgotten", forgets=True, evaluate_fn=None)
    assert bits(resumed) != bits(expected)


def test_a_state_dict_that_files_cannot_hold_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    strategy = FlowersWithMomentum()
    strategy.momentum["of"] = object()
    assert state_of(strategy) is None
    reason = "FlowersWithMomentum.state_dict() cannot be written: files cannot hold a value of type object"
    assert f"There will be no checkpoint: {reason}" in caplog.text


def test_a_strategy_may_refuse_its_state() -> None:
    strategy = FlowersWithMomentum()
    state = state_of(strategy)
    assert state is not None
    strategy.momentum["w"] = np.ones(2)
    saved = state.changed()
    assert saved is not None

    def load_state_dict(state: dict[str, Any]) -> None:
        raise ValueError("it is of version 1")

    strategy.load_state_dict = load_state_dict  # type: ignore[method-assign]
    with pytest.raises(
        ConfigError, match=r"the strategy itself refuses its state .*: it is of version 1\. Use"
    ):
        state.restore(saved)


def test_a_run_that_cannot_be_resumed_says_so_at_its_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RUN_DIR_VARIABLE, str(tmp_path))
    run("", Derived(), tmp_path / "checkpoint")
    (line,) = [record.getMessage() for record in caplog.records if "checkpoint" in record.getMessage()]
    assert line.startswith("There will be no checkpoint, so this run cannot be resumed: the state of ")
    assert "test_resumed_strategies.Derived is not known" in line
    assert "all strategies with state_dict() and load_state_dict()" in line
    caplog.clear()
    run("", FedAdam(), tmp_path / "known")
    assert "checkpoint" not in caplog.text


class Derived(FedAdam):
    """May keep any state."""


class OwnStart(FedAvg):
    """Delegates all calls."""

    def start(self, *args: Any, **kwargs: Any) -> Result:
        return super().start(*args, **kwargs)


def with_own(name: str, value: Any) -> Strategy:
    strategy = FedAvg()
    setattr(strategy, name, value)
    return strategy


REFUSED: dict[str, Callable[[], Strategy]] = {
    "a derived class": Derived,
    "a start of its own": OwnStart,
    "a method of one object": lambda: with_own("configure_evaluate", lambda *args: []),
    "a derived class inside": lambda: flowers.DifferentialPrivacyServerSideFixedClipping(
        Derived(), 0.3, 2.0, NODES
    ),
    "an object": lambda: with_own("more", object()),
    "an object inside": lambda: with_own("more", [{"key": object()}]),
    "an array of objects": lambda: with_own("more", np.array([None])),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_strategy_with_unknown_state_runs_without_a_checkpoint(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    result, last, recorded = run("", REFUSED[kind](), tmp_path)
    assert len(result.train_metrics_clientapp) == ROUNDS
    assert last is None and not list(tmp_path.iterdir())
    assert [event.resumes for event in recorded.of("strategy_started")] == [None]
    warned = [record.getMessage() for record in caplog.records if "checkpoint" in record.getMessage()]
    assert warned == [line for line in warned if "FedAvg.more cannot be written: files cannot hold" in line]
    assert len(warned) == ("object" in kind and "method" not in kind)


def test_a_replaced_method_does_not_count_as_flowers_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kind_of(FedAdam()) == "flwr.serverapp.strategy.FedAdam"

    def configure_train(self: Any, *args: Any) -> Any:
        return []

    monkeypatch.setattr(FedAvg, "configure_train", configure_train)
    assert kind_of(FedAvg()) is None


def test_a_round_that_cannot_be_written_keeps_the_previous_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    strategy = FedAdam()

    def keeps_the_best(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        if server_round == 2:
            strategy.best = object()  # type: ignore[attr-defined]
        return total(server_round, arrays)

    result, last, _ = run("", strategy, tmp_path, evaluate_fn=keeps_the_best)
    assert len(result.train_metrics_clientapp) == ROUNDS
    assert last is not None and last.server_round == 1
    assert "FedAdam.best cannot be written: files cannot hold a value of type object" in caplog.text


def test_arguments_of_the_app_apply_when_a_run_is_resumed(tmp_path: Path) -> None:
    run("", FedAdam(eta=0.1), tmp_path / "whole", Copied)
    strategy = FedAdam(eta=0.7)
    resumed = Checkpoints(tmp_path / "2", StateStore()).read()
    assert resumed is not None and resumed.strategy_state is not None
    state = state_of(strategy)
    assert state is not None
    state.restore(resumed.strategy_state)
    assert strategy.eta == 0.7 and strategy.m_t is not None and strategy.m_t["w"].dtype == np.float64


def test_values_of_all_kinds_are_restored() -> None:
    saved = {
        "numbers": [1, 2**80, -0.0, float("inf"), True, None, "text \ud800"],
        ("a", 1): (b"", b"\0bytes", [], {}, ()),
        3: [np.float32(0.1), np.int64(-1), np.datetime64("2026-01-31"), np.bool_(True)],
        "arrays": {
            "transposed": np.arange(6, dtype=np.float16).reshape(2, 3).T,
            "every other": np.arange(9)[::2],
            "empty": np.zeros((0, 3), np.complex64),
            "none": np.array(1.5),
            "texts": np.array(["a", "bcd"]),
        },
        "records": [MetricRecord({"a": [1.5]}), ConfigRecord({"b": b"c"}), initial_arrays("")],
    }
    original, restored = FedAvg(), FedAvg()
    first = state_of(original)
    assert first is not None
    original.kept = saved  # type: ignore[attr-defined]
    changed = first.changed()
    assert changed is not None and list(changed["attributes"]) == ["kept"]
    written = record_bytes.encode(changed)
    del changed
    state = state_of(restored)
    assert state is not None
    state.restore(record_bytes.decode(written))
    values = restored.kept  # type: ignore[attr-defined]
    assert repr(values) == repr(saved) and values["records"] == saved["records"]
    for name, array in saved["arrays"].items():
        assert values["arrays"][name].dtype == array.dtype
        np.testing.assert_array_equal(values["arrays"][name], array, strict=True)
        assert values["arrays"][name].flags.writeable
    assert [type(value) for value in values[3]] == [type(value) for value in saved[3]]


def test_an_accountant_that_refuses_its_state_is_an_error_with_advice(tmp_path: Path) -> None:
    name = "DifferentialPrivacyClientSideFixedClipping"
    run(name, MAKE[name](), tmp_path)
    without = flowers.DifferentialPrivacyClientSideFixedClipping(FedAvg(), 0.3, 2.0, NODES)
    with pytest.raises(ConfigError, match=r"strategy's accountant refuses its state .* in another folder"):
        run(name, without, tmp_path)


def test_only_the_first_start_of_an_app_is_resumed(tmp_path: Path) -> None:
    results: list[Result] = []
    for _ in range(2):
        checkpoints = Checkpoints(tmp_path, StateStore())
        nodes = new_nodes(NODES)
        np.random.seed(len(results))

        def main(grid: Any, context: Any) -> None:
            strategy = FedAdam()
            results.append(strategy.start(grid, initial_arrays(""), 2))
            results.append(strategy.start(grid, results[-1].arrays, 1))

        recorded = run_app(
            main, Trainers(nodes, ""), nodes, 1, checkpoints=checkpoints, resumed=checkpoints.read()
        )
        last = Checkpoints(tmp_path, StateStore()).read()
        assert last is not None and last.server_round == 2
    assert [phase.round for phase in recorded.phases("train")] == [1], "of the second start"
    assert list(map(bits, results[2:])) == list(map(bits, results[:2]))


def test_a_second_start_has_no_checkpoint_if_the_first_could_not_have_any(tmp_path: Path) -> None:
    nodes = new_nodes(NODES)

    def main(grid: Any, context: Any) -> None:
        arrays = Derived().start(grid, initial_arrays(""), 1).arrays
        FedAdam().start(grid, arrays, 1)

    recorded = run_app(main, Trainers(nodes, ""), nodes, 1, checkpoints=Checkpoints(tmp_path, StateStore()))
    assert [event.resumes for event in recorded.of("strategy_started")] == [None, None]
    assert not list(tmp_path.iterdir())
