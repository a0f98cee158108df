"""What a function in several ranks computes, and what comes back of it (on the CPU, with gloo)."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest

from flower_gpu import GPUClient, InvalidResultError, run_in_worker
from flower_gpu.errors import ConfigError

Weights = list[np.ndarray]


@pytest.fixture(scope="module")
def weights() -> Weights:
    return run_in_worker("ranks_tasks:first_weights")


def fit(name: str, weights: Weights, num_gpus: int, **config: Any) -> Any:
    return GPUClient(f"ranks_tasks:{name}", num_gpus=num_gpus).fit(weights, config)


def difference(ours: Weights, theirs: Weights) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(ours, theirs, strict=True))


@pytest.fixture(scope="module")
def alone(weights: Weights) -> Any:
    """What one process learns with the whole batch."""
    return fit("train", weights, 1, epochs=2)


@pytest.mark.parametrize(("way", "num_gpus"), [("ddp", 2), ("fsdp", 2), ("ddp", 1)])
def test_ranks_learn_what_one_process_does(way: str, num_gpus: int, weights: Weights, alone: Any) -> None:
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
def test_ranks_evaluate_together(way: str, weights: Weights) -> None:
    """One of two ranks has one more of the 101 examples."""
    expected = GPUClient(evaluate_fn="ranks_tasks:evaluate").evaluate(weights, {})
    client = GPUClient(evaluate_fn="ranks_tasks:evaluate_in_ranks", num_gpus=2)
    loss, num_examples, metrics = client.evaluate(weights, {"way": way})
    assert num_examples == expected[1] == 101
    assert loss == pytest.approx(expected[0], abs=1e-6)
    assert metrics == pytest.approx(expected[2], abs=1e-6)


def test_who_they_are() -> None:
    found = run_in_worker("ranks_tasks:who", num_gpus=2, env={"OMP_NUM_THREADS": "2"})
    assert found["rank"] == 0
    assert found["world"] == 2
    assert found["total"] == 3
    assert found["mean"] == {"a": 0.5, "b": 1.0}
    assert found["threads"] == 1  # the cores of the call are divided
    assert found["visible"] == ""
    alone = run_in_worker("ranks_tasks:who")
    assert (alone["rank"], alone["world"], alone["total"]) == (0, 1, 1)


def test_a_divided_model(weights: Weights) -> None:
    found = run_in_worker("ranks_tasks:parts", weights, num_gpus=2)
    assert found["is_sharded"]
    assert found["own"] == found["of"] / 2  # all of its tensors can be halved
    assert found["tied"]
    assert found["scale"] == [0.5, 0.5]
    assert difference(found["back"], weights) == 0
    assert difference(found["plus_one"], [array + 1 for array in weights]) == 0


def test_a_divided_model_after_an_evaluation(tmp_path: Path) -> None:
    """It has its parameters as a whole then, and still is one in parts."""
    path = tmp_path / "model.safetensors"
    weights, back = run_in_worker("ranks_tasks:parts_after_evaluation", str(path), num_gpus=2)
    assert difference(back, weights) == 0
    assert path.exists()


def test_the_number_of_examples_is_that_of_all() -> None:
    says = r"different numbers of examples \(rank 0 100, rank 1 101\)"
    with pytest.raises(InvalidResultError, match=says):
        GPUClient("ranks_tasks:different_counts", num_gpus=2).fit([np.zeros(2)], {})


class Callable:
    def __call__(self, *args: Any) -> Any:
        return args


def test_what_is_no_plain_function() -> None:
    """A partial and an object have no name of their own; what is distributed has options already."""
    import ranks_tasks

    from flower_gpu import distributed

    part = distributed(partial(ranks_tasks.arguments, a=1))
    assert run_in_worker(part, 5, num_gpus=2) == (2, (5,), {"a": 1})
    again = distributed(distributed(ranks_tasks.arguments, num_gpus=2), timeout_s=5, num_gpus=3)
    assert (again.num_gpus, again.timeout_s, again.task) == (3, 5, ranks_tasks.arguments)
    found = cloudpickle.loads(cloudpickle.dumps(distributed(Callable())))
    assert found(1) == (1,)


def test_a_function_given_by_name_says_that_it_asked_for_more(capfd: pytest.CaptureFixture[str]) -> None:
    """Its client does not import it, and so cannot know."""
    assert run_in_worker("ranks_tasks:asks_for_two") == 1
    assert "asks_for_two is for 2 GPUs, but its call has asked for one" in capfd.readouterr().err
    assert run_in_worker("ranks_tasks:asks_for_two", num_gpus=2) == 2
    assert "asks_for_two" not in capfd.readouterr().err


def test_in_process_there_is_one() -> None:
    assert run_in_worker("ranks_tasks:who", num_gpus=2, start_method="in-process")["world"] == 1


def test_a_client_says_it_in_one_place(weights: Weights) -> None:
    from flower_gpu import distributed

    client = GPUClient(distributed("ranks_tasks:train", num_gpus=2), "ranks_tasks:evaluate")
    _, _, metrics = client.fit(weights, {})
    assert metrics["kind"] == "DistributedDataParallel"
    assert client.evaluate(weights, {})[1] == 101  # in one process, as it was given


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
def test_options_that_cannot_be_used(options: dict[str, Any], kind: type[Exception]) -> None:
    from flower_gpu import distributed

    with pytest.raises(kind, match="of a distributed function must be"):
        distributed("ranks_tasks:train", **options)
