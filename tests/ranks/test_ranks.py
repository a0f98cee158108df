"""Functions in several ranks: they compute and return the same as one process (on the CPU, with gloo)."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
from weights_difference import difference

from flower_gpu import GPUClient, InvalidResultError, run_in_worker
from flower_gpu.errors import ConfigError

Weights = list[np.ndarray]


@pytest.fixture(scope="module")
def weights() -> Weights:
    return run_in_worker("ranks_tasks:first_weights")


def fit(name: str, weights: Weights, num_gpus: int, **config: Any) -> Any:
    return GPUClient(f"ranks_tasks:{name}", num_gpus=num_gpus).fit(weights, config)


@pytest.fixture(scope="module")
def alone(weights: Weights) -> Any:
    """The result of training in one process with the whole batch."""
    return fit("train", weights, 1, epochs=2)


@pytest.mark.parametrize(("way", "num_gpus"), [("ddp", 2), ("fsdp", 2), ("ddp", 1)])
def test_ranks_learn_the_same_as_one_process(way: str, num_gpus: int, weights: Weights, alone: Any) -> None:
    learned, num_examples, metrics = fit("train_in_ranks", weights, num_gpus, epochs=2, way=way)
    assert difference(weights, learned) > 0.01
    assert difference(alone[0], learned) < 1e-5
    assert [array.dtype for array in learned] == [array.dtype for array in weights]
    assert num_examples == alone[1] == 256
    assert metrics["rank"] == "0"
    assert metrics["loss"] == pytest.approx(alone[2]["loss"], abs=1e-5)
    kind = {"ddp": "DistributedDataParallel", "fsdp": "FSDPNet"}[way] if num_gpus > 1 else "Net"
    assert metrics["kind"] == kind


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_each_example_is_evaluated_once(way: str, weights: Weights) -> None:
    """101 is odd, so one of the two ranks has one more example."""
    expected = GPUClient(evaluate_fn="ranks_tasks:evaluate").evaluate(weights, {})
    client = GPUClient(evaluate_fn="ranks_tasks:evaluate_in_ranks", num_gpus=2)
    loss, num_examples, metrics = client.evaluate(weights, {"way": way})
    assert num_examples == expected[1] == 101
    assert loss == pytest.approx(expected[0], abs=1e-6)
    assert metrics == pytest.approx(expected[2], abs=1e-6)


def test_each_rank_knows_its_number_and_gets_its_share_of_the_cores() -> None:
    report = run_in_worker("ranks_tasks:rank_info", num_gpus=2, env={"OMP_NUM_THREADS": "2"})
    assert report["rank"] == 0
    assert report["world"] == 2
    assert report["total"] == 3
    assert report["mean"] == {"a": 0.5, "b": 1.0}
    assert report["threads"] == 1  # the two threads of the call are divided
    assert report["visible"] == ""
    alone = run_in_worker("ranks_tasks:rank_info")
    assert (alone["rank"], alone["world"], alone["total"]) == (0, 1, 1)


def test_weights_of_a_sharded_model_can_be_read_and_set(weights: Weights) -> None:
    report = run_in_worker("ranks_tasks:parts", weights, num_gpus=2)
    assert report["is_sharded"]
    assert report["local_size"] == report["total_size"] / 2  # all tensors can be halved
    assert report["tied"]
    assert report["scale"] == [0.5, 0.5]
    assert difference(report["back"], weights) == 0
    assert difference(report["plus_one"], [array + 1 for array in weights]) == 0


def test_weights_of_a_sharded_model_can_be_read_after_an_evaluation(tmp_path: Path) -> None:
    """After the evaluation, the parameters are complete, although the model is still sharded."""
    path = tmp_path / "model.safetensors"
    weights, back = run_in_worker("ranks_tasks:parts_after_evaluation", str(path), num_gpus=2)
    assert difference(back, weights) == 0
    assert path.exists()


def test_ranks_must_agree_on_the_number_of_examples() -> None:
    text = r"different numbers of examples \(rank 0 100, rank 1 101\)"
    with pytest.raises(InvalidResultError, match=text):
        GPUClient("ranks_tasks:different_counts", num_gpus=2).fit([np.zeros(2)], {})


class Callable:
    def __call__(self, *args: Any) -> Any:
        return args


def test_partials_callable_objects_and_distributed_functions_can_be_distributed() -> None:
    """A partial and an object have no name, and a distributed function already has options."""
    import ranks_tasks

    from flower_gpu import distributed

    partial_task = distributed(partial(ranks_tasks.arguments, a=1))
    assert run_in_worker(partial_task, 5, num_gpus=2) == (2, (5,), {"a": 1})
    again = distributed(distributed(ranks_tasks.arguments, num_gpus=2), timeout_s=5, num_gpus=3)
    assert (again.num_gpus, again.timeout_s, again.task) == (3, 5, ranks_tasks.arguments)
    restored = cloudpickle.loads(cloudpickle.dumps(distributed(Callable())))
    assert restored(1) == (1,)


def test_a_function_given_by_name_warns_if_its_call_has_too_few_gpus(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The client does not import the function, so it does not know the number of GPUs."""
    assert run_in_worker("ranks_tasks:asks_for_two") == 1
    assert "asks_for_two is for 2 GPUs, but its call has asked for one" in capfd.readouterr().err
    assert run_in_worker("ranks_tasks:asks_for_two", num_gpus=2) == 2
    assert "asks_for_two" not in capfd.readouterr().err


def test_in_process_a_distributed_function_runs_in_one_rank() -> None:
    assert run_in_worker("ranks_tasks:rank_info", num_gpus=2, start_method="in-process")["world"] == 1


def test_only_the_distributed_function_of_a_client_runs_in_ranks(weights: Weights) -> None:
    from flower_gpu import distributed

    client = GPUClient(distributed("ranks_tasks:train", num_gpus=2), "ranks_tasks:evaluate")
    _, _, metrics = client.fit(weights, {})
    assert metrics["kind"] == "DistributedDataParallel"
    assert client.evaluate(weights, {})[1] == 101  # runs in one process


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"timeout_s": "10"}, TypeError),
        ({"timeout_s": 0}, ConfigError),
        ({"timeout_s": float("nan")}, ConfigError),
        ({"num_gpus": 0.5}, TypeError),
        ({"num_gpus": 0}, ConfigError),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], kind: type[Exception]) -> None:
    from flower_gpu import distributed

    with pytest.raises(kind, match="of a distributed function must be"):
        distributed("ranks_tasks:train", **options)
