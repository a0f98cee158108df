"""What a function in several ranks computes, and what comes back of it (on the CPU, with gloo)."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest

from flower_gpu import GPUClient, InvalidResultError, RankError, run_in_worker
from flower_gpu.errors import ConfigError

pytestmark = pytest.mark.timeout(120)

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


@pytest.mark.parametrize(("name", "num_gpus"), [("ddp", 2), ("fsdp", 2), ("ddp", 1)])
def test_ranks_learn_what_one_process_does(name: str, num_gpus: int, weights: Weights, alone: Any) -> None:
    learned, num_examples, metrics = fit(name, weights, num_gpus, epochs=2)
    assert difference(weights, learned) > 0.01
    assert difference(alone[0], learned) < 1e-5
    assert [array.dtype for array in learned] == [array.dtype for array in weights]
    assert num_examples == alone[1] == 256
    assert metrics["rank"] == "0"
    assert metrics["loss"] == pytest.approx(alone[2]["loss"], abs=1e-5)
    kind = {"ddp": "DistributedDataParallel", "fsdp": "FSDPNet"}[name] if num_gpus > 1 else "Net"
    assert metrics["kind"] == kind


@pytest.mark.parametrize("name", ["evaluate_ddp", "evaluate_fsdp"])
def test_each_example_is_evaluated_once(name: str, weights: Weights) -> None:
    """101 examples are no multiple of 2: one is there twice, and must not count."""
    expected = GPUClient(evaluate_fn="ranks_tasks:evaluate").evaluate(weights, {})
    loss, num_examples, metrics = GPUClient(evaluate_fn=f"ranks_tasks:{name}", num_gpus=2).evaluate(
        weights, {}
    )
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


@pytest.mark.parametrize(("first", "then"), [("ddp", "fsdp"), ("fsdp", "ddp")])
def test_a_checkpoint_of_any_ranks(first: str, then: str, tmp_path: Path) -> None:
    """Stopped and continued by other ranks, momentum and all, it is where it would be without that."""
    path, whole = str(tmp_path / "checkpoint.pt"), str(tmp_path / "whole.pt")
    run_in_worker(f"ranks_tasks:{first}_checkpointed", path, first, 2, num_gpus=2)
    learned, done = run_in_worker(f"ranks_tasks:{then}_checkpointed", path, then, 3, num_gpus=2)
    expected, _ = run_in_worker("ranks_tasks:checkpointed", whole, "", 5)
    assert done == 5
    assert difference(learned, expected) < 1e-5
    assert {file.name for file in tmp_path.iterdir()} == {"checkpoint.pt", "whole.pt"}
    one_more, done = run_in_worker("ranks_tasks:checkpointed", path, "", 0)
    assert done == 5
    assert difference(one_more, learned) == 0


def test_a_checkpoint_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(b"something else")
    with pytest.raises(RankError, match="cannot be read as a checkpoint"):
        run_in_worker("ranks_tasks:ddp_checkpointed", str(path), "ddp", 1, num_gpus=2)
    assert path.read_bytes() == b"something else"


@pytest.mark.parametrize(("num_gpus", "rates"), [(2, [0.1, 0.125, 0.15, 0.175, 0.2]), (1, [0.1] * 5)])
def test_warm_up_goes_on_after_a_checkpoint(num_gpus: int, rates: list[float], tmp_path: Path) -> None:
    """Also of an optimizer that keeps nothing else."""
    seen = run_in_worker("ranks_tasks:warmed_up", str(tmp_path / "checkpoint.pt"), num_gpus=num_gpus)
    assert seen == pytest.approx([*rates, 0.1])


def test_what_could_not_be_read_again_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    with pytest.raises(RankError, match=r"extra, a float64, cannot be in a checkpoint.* make float"):
        run_in_worker("ranks_tasks:cannot_be_saved", str(path), np.float64(0.5), num_gpus=2)
    assert not path.exists()
    with pytest.raises(RankError, match=r"rank 0 of 2: .*does not exist") as caught:
        run_in_worker("ranks_tasks:cannot_be_saved", str(tmp_path / "not" / "there"), 0.5, num_gpus=2)
    assert caught.value.rank == 0


@pytest.mark.parametrize(("features", "momentum"), [(3, 0.9), (2, 0.0)])
def test_a_checkpoint_of_something_else(features: int, momentum: float, tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint.pt")
    with pytest.raises(RankError, match=r"checkpoint\.pt is not of this model and optimizer"):
        run_in_worker("ranks_tasks:other_than_saved", path, features, momentum, num_gpus=2)


def test_the_learning_rate_is_scaled() -> None:
    *sizes_and_rates, at_the_end = run_in_worker("ranks_tasks:rates", num_gpus=2)
    assert sizes_and_rates == pytest.approx([5, 0.1, 0.15, 0.2, 0.2, 0.2])
    assert at_the_end == 0.1
    alone = run_in_worker("ranks_tasks:rates")
    assert alone == pytest.approx([5, 5, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1])


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("different_counts", r"different numbers of examples \(rank 0 100, rank 1 101\)"),
        ("part_of_the_count", "returned 32 examples, which is what this rank had of 64"),
    ],
)
def test_the_number_of_examples_is_that_of_all(name: str, says: str) -> None:
    with pytest.raises((InvalidResultError, RankError), match=says):
        GPUClient(f"ranks_tasks:{name}", num_gpus=2).fit([np.zeros(2)], {})


def test_parameters_that_a_batch_does_not_use() -> None:
    """PyTorch names the option by which it works, and there it is."""
    with pytest.raises(RankError, match="find_unused_parameters=True"):
        run_in_worker("ranks_tasks:one_head", False, num_gpus=2)
    assert run_in_worker("ranks_tasks:one_head", True, num_gpus=2) == 2


def test_a_sampler_of_other_examples_is_refused() -> None:
    with pytest.raises(RankError, match="draws a number of samples"):
        run_in_worker("ranks_tasks:sampler_of_others", num_gpus=2)


class Callable:
    def __call__(self, *args: Any) -> Any:
        return args


def test_what_is_no_plain_function() -> None:
    """A partial and an object have no name of their own; what is distributed has options already."""
    import ranks_tasks

    from flower_gpu import distributed

    part = distributed(partial(ranks_tasks.arguments, a=1), strategy="fsdp")
    assert run_in_worker(part, 5, num_gpus=2) == (2, "fsdp", (5,), {"a": 1})
    again = distributed(distributed(ranks_tasks.arguments, num_gpus=2), strategy="fsdp", num_gpus=3)
    assert (again.num_gpus, again.settings.strategy, again.task) == (3, "fsdp", ranks_tasks.arguments)
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


def test_a_config_says_that_nothing_is_scaled() -> None:
    from flower_gpu import distributed

    assert distributed("ranks_tasks:train", lr_scaling="none").settings == distributed("x:y").settings


@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "pipeline"},
        {"lr_scaling": "cubic"},
        {"warmup_steps": -1, "lr_scaling": "linear"},
        {"warmup_steps": True, "lr_scaling": "linear"},
        {"warmup_steps": 5},
        {"timeout_s": 0},
        {"timeout_s": float("nan")},
        {"num_gpus": 0.5},
        {"num_gpus": 0},
    ],
)
def test_options_that_cannot_be_used(options: dict[str, Any]) -> None:
    from flower_gpu import distributed

    with pytest.raises(ConfigError):
        distributed("ranks_tasks:train", **options)
    with pytest.raises(TypeError, match="no option 'gpus'"):
        distributed("ranks_tasks:train", gpus=2)
