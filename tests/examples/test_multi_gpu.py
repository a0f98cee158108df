"""examples/multi_gpu on the CPU: two ranks learn the same as one, and a killed training can be resumed."""

from __future__ import annotations

import os
import re
import signal
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from launched import REPOSITORY, SIMULATE, Launch
from run_programs import run_python
from torch.utils.data import DataLoader, TensorDataset

from flower_gpu import RankError, distributed, run_in_worker
from flower_gpu.pytorch.distributed import rank

APP = REPOSITORY / "examples" / "multi_gpu"
DEFAULTS = tomllib.loads((APP / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]

sys.path.insert(0, str(APP))
from multi_gpu import task  # noqa: E402

Weights = dict[str, np.ndarray]


def settings(partition_id: int = 0, num_partitions: int = 2, **changed: Any) -> dict[str, Any]:
    """Return the settings of a training: run config, node config and the seed of the call."""
    changed = {name.replace("_", "-"): value for name, value in changed.items()}
    assert set(changed) <= {*DEFAULTS, "seed-of-call"}
    node = {"partition-id": partition_id, "num-partitions": num_partitions}
    return {**DEFAULTS, **node, "seed-of-call": 7, **changed}


def initial_weights(config: dict[str, Any], data: TensorDataset) -> Weights:
    torch.manual_seed(1)
    return task.get_state(task.build_model(config, data[0][0].shape[0]))


def loss_of(weights: Weights, config: dict[str, Any], data: TensorDataset) -> float:
    model = task.build_model(config, data[0][0].shape[0])
    model.load_state_dict({name: torch.from_numpy(array) for name, array in weights.items()})
    return float(task.measure(model, DataLoader(data, 100))["loss"])


def learn(
    num_gpus: int,
    data: Any,
    config: dict[str, Any],
    *more: Any,
    function: str = "multi_gpu.training:learn",
) -> tuple[Weights, Any]:
    initial = initial_weights(config, data)
    learned, metrics = run_in_worker(
        distributed(function), initial, data, config, *more, num_gpus=num_gpus, timeout_s=400
    )
    assert difference(learned, initial) > 0.01
    assert all(np.isfinite(array).all() for array in learned.values())
    return learned, metrics


def difference(ours: Weights, theirs: Weights) -> float:
    assert list(ours) == list(theirs)
    return max(float(np.abs(array - theirs[name]).max()) for name, array in ours.items())


def learn_in_double(arrays: Weights, data: TensorDataset, config: dict[str, Any]) -> Any:
    """Run ``training.learn`` in double precision, so rounding errors stay negligible."""
    # This import takes seconds, which would also delay the mere collection of tests.
    from multi_gpu import training

    torch.set_default_dtype(torch.float64)
    images, labels = data.tensors
    return training.learn(arrays, TensorDataset(images.double(), labels), config)


def killed_after_the_second_epoch(*args: Any) -> Any:
    """Run ``training.learn``, and kill rank 1 once the second checkpoint is written."""
    from multi_gpu import training

    save = training.save

    def save_and_end(path: Path, model: Any, optimizer: Any, epoch: int, losses: Any) -> None:
        save(path, model, optimizer, epoch, losses)
        # After the barrier, rank 0 has written the checkpoint.
        torch.distributed.barrier()
        if epoch == 2 and rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    training.save = save_and_end
    return training.learn(*args)


def test_client_and_server_processes_never_import_torch() -> None:
    script = (
        "import sys\n"
        "from multi_gpu import client_app, server_app\n"
        "print(sorted({'torch', 'torchvision', 'sklearn'} & set(sys.modules)))\n"
    )
    done = run_python(script, cwd=APP)
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr


@pytest.mark.timeout(600)
def test_two_ranks_learn_the_same_as_one() -> None:
    images, labels = task.load_partition(settings())
    data = task.to_dataset(images[:120], labels[:120])
    config = settings(norm="group", batch_size=40, learning_rate=0.02)
    function = f"{__name__}:learn_in_double"
    weights_of_one, metrics_of_one = learn(1, data, config, function=function)
    for strategy in ("ddp", "fsdp"):
        weights_of_two, metrics_of_two = learn(2, data, {**config, "strategy": strategy}, function=function)
        assert difference(weights_of_one, weights_of_two) < 1e-8
        # With two ranks, the reported loss is that of rank 0's half of the images.
        assert metrics_of_two["train_loss"] != metrics_of_one["train_loss"]
    assert loss_of(weights_of_one, config, data) < loss_of(initial_weights(config, data), config, data)


@pytest.mark.timeout(600)
def test_a_killed_training_continues_from_its_checkpoint(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from multi_gpu import training

    # There are fewer examples than fit in a batch.
    config = settings(local_epochs=3, checkpoint_dir=str(tmp_path), batch_size=32)
    data = TensorDataset(*task.to_dataset(*task.load_partition(config))[:20])
    checkpoint = training.checkpoint_of({"w": np.zeros(3)}, 1, config)
    assert checkpoint.parent == tmp_path / "client-0"
    # Another model has another checkpoint.
    assert training.checkpoint_of({"w": np.ones(3)}, 1, config) != checkpoint
    name = f"{__name__}:killed_after_the_second_epoch"
    with pytest.raises(RankError, match=r"rank 1 of 2: .* was killed by SIGKILL"):
        learn(2, data, config, checkpoint, function=name)
    assert list(checkpoint.parent.iterdir()) == [checkpoint]

    resumed, resumed_metrics = learn(2, data, config, checkpoint)
    assert "goes on after epoch 2 of 3" in capfd.readouterr().out
    assert list(checkpoint.parent.iterdir()) == []
    uninterrupted, metrics = learn(2, data, config)
    assert difference(resumed, uninterrupted) == 0
    assert resumed_metrics == metrics


@pytest.mark.timeout(600)
def test_a_simulation_with_two_ranks_for_each_call(launch: Launch) -> None:
    options = ["--num-supernodes", "1", "--num-gpus", "2"]
    options += ["--run-config", "num-server-rounds=1 local-epochs=1"]
    done = launch(APP, *options, command=SIMULATE, timeout_s=500)
    assert done.code == 0, done.output + done.logs()
    metrics = done.result["rounds"][0]["metrics"]["server-evaluate"]
    assert metrics["loss"] < 2.3, "the loss of an untrained model"
    ranks = re.findall(r"process (\d+) is rank (\d) of 2", done.output)
    assert sorted(number for _, number in ranks) == ["0", "1"]
    assert len({pid for pid, _ in ranks}) == 2
