"""The quickstart's data, models, training and evaluation, called directly with the app's default settings."""

import hashlib
import pickle
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from properties import examples
from run_programs import run_python
from safetensors.torch import load_file

from flower_gpu.pytorch.weights import get_weights

ROOT = Path(__file__).parents[2]
APP = ROOT / "examples" / "quickstart"
DEFAULTS = tomllib.loads((APP / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]

sys.path.insert(0, str(APP))
from quickstart import task  # noqa: E402


@pytest.fixture(autouse=True)
def _no_run_dir(monkeypatch):
    monkeypatch.delenv("FLOWER_GPU_RUN_DIR", raising=False)


def app_settings(partition_id=0, num_partitions=2, **changed):
    """Return the settings of a client, which are its run config and its node config."""
    unknown = {key.replace("_", "-") for key in changed} - set(DEFAULTS)
    assert not unknown, f"not in pyproject.toml: {unknown}"
    changed = {key.replace("_", "-"): value for key, value in changed.items()}
    return {**DEFAULTS, **changed, "partition-id": partition_id, "num-partitions": num_partitions}


def partitions(labels, num_partitions, **changed):
    """Return the indices of the examples of each client."""
    return [
        task.partition(labels, app_settings(partition_id, num_partitions, **changed))
        for partition_id in range(num_partitions)
    ]


@pytest.fixture(scope="module")
def labels():
    return task.load_data(app_settings(), train=True)[1]


# --- the app's folder -------------------------------------------------------------------------------------


def test_the_app_is_short_enough_to_copy():
    files = [path for path in APP.rglob("*") if path.suffix in (".py", ".toml", ".md")]
    assert len(files) == 6
    assert sum(len(path.read_text().splitlines()) for path in files) <= 205


def test_client_and_server_processes_never_import_torch():
    script = (
        "import sys\n"
        "from flwr.common import Context, RecordDict\n"
        "from quickstart import client_app, server_app\n"
        "config = {'partition-id': 0, 'num-partitions': 2}\n"
        "context = Context(run_id=1, node_id=1, node_config=config, state=RecordDict(), run_config={})\n"
        "client_app.client_fn(context)\n"
        "print(sorted({'torch', 'torchvision', 'sklearn', 'datasets'} & set(sys.modules)))\n"
    )
    done = run_python(script, cwd=APP)
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr


@pytest.mark.parametrize(("clients_per_round", "sampled"), [(0, 6), (4, 4)])
def test_server_waits_for_all_clients_and_samples_as_many_as_asked(monkeypatch, clients_per_round, sampled):
    from flwr.common import Context, RecordDict, parameters_to_ndarrays
    from quickstart import server_app

    monkeypatch.setenv("FLOWER_GPU_START_METHOD", "in-process")
    run_config = {**DEFAULTS, "num-clients": 6, "clients-per-round": clients_per_round}
    context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config=run_config)
    components = server_app.server_fn(context)
    assert components.strategy.num_fit_clients(6) == (sampled, 6)
    assert components.config.num_rounds == DEFAULTS["num-server-rounds"]
    weights = parameters_to_ndarrays(components.strategy.initial_parameters)
    loss, metrics = components.strategy.evaluate(0, components.strategy.initial_parameters)
    # The loss of an untrained model is about log(10).
    assert loss > 2
    assert set(metrics) == {"accuracy", "num_examples"}
    assert all(np.array_equal(a, b) for a, b in zip(weights, task.initial_weights(run_config), strict=True))


# --- partitions -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["iid", "dirichlet"])
@settings(max_examples=examples(4))
@given(num_partitions=st.integers(1, 16), seed=st.integers(0, 2**32 - 1), data=st.data())
def test_partitions_are_disjoint_complete_and_repeatable(kind, labels, num_partitions, seed, data):
    parts = partitions(labels, num_partitions, partition=kind, seed=seed)
    assert sorted(index for part in parts for index in part) == list(range(len(labels)))
    # BatchNorm needs at least two examples.
    assert min(len(part) for part in parts) >= 2
    again = data.draw(st.integers(0, num_partitions - 1))
    changed = {"partition": kind, "seed": seed}
    assert task.partition(labels, app_settings(again, num_partitions, **changed)) == parts[again]


def test_iid_partitions_have_equal_sizes_and_dirichlet_partitions_favour_labels(labels):
    def largest_share(parts):
        return np.mean([np.bincount(labels[part], minlength=10).max() / len(part) for part in parts])

    iid = partitions(labels, 10, partition="iid")
    assert {len(part) for part in iid} <= {len(labels) // 10, len(labels) // 10 + 1}
    dirichlet = partitions(labels, 10, partition="dirichlet", dirichlet_alpha=0.1)
    assert largest_share(iid) < 0.25 < largest_share(dirichlet)


# --- data -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dataset", "shape", "num_train", "num_test"),
    [("digits", (1, 8, 8), 1437, 360), ("synthetic", (3, 32, 32), 512, 512)],
)
def test_held_out_images_are_in_no_partition(dataset, shape, num_train, num_test):
    images, labels = task.load_data(app_settings(dataset=dataset), train=True)
    held_out, held_out_labels = task.load_data(app_settings(dataset=dataset), train=False)
    assert (images.shape, held_out.shape) == ((num_train, *shape), (num_test, *shape))
    for part, part_labels in ((images, labels), (held_out, held_out_labels)):
        assert part.dtype == torch.uint8
        assert (part_labels.dtype, len(part_labels)) == (torch.int64, len(part))
        assert set(part_labels.tolist()) == set(range(10))
        # The pixels use the whole range of a byte.
        assert part.max() > 200
    assert not {image.numpy().tobytes() for image in images} & {image.numpy().tobytes() for image in held_out}


def test_cifar10_is_read_from_data_dir(tmp_path, monkeypatch):
    from torchvision import datasets

    # The files have the format of CIFAR-10 with fewer images, so only the checksums must be replaced.
    generator = np.random.default_rng(0)
    folder = tmp_path / datasets.CIFAR10.base_folder
    folder.mkdir()
    arrays, checksums = {}, {}
    for name in ("data_batch_1", "test_batch", "batches.meta"):
        arrays[name] = generator.integers(0, 256, (6, 3 * 32 * 32), dtype=np.uint8)
        content = pickle.dumps(
            {"data": arrays[name], "labels": [3, 1, 4, 1, 5, 9], "label_names": list("abcdefghij")}
        )
        (folder / name).write_bytes(content)
        checksums[name] = hashlib.md5(content).hexdigest()
    monkeypatch.setattr(datasets.CIFAR10, "train_list", [["data_batch_1", checksums["data_batch_1"]]])
    monkeypatch.setattr(datasets.CIFAR10, "test_list", [["test_batch", checksums["test_batch"]]])
    meta = {**datasets.CIFAR10.meta, "md5": checksums["batches.meta"]}
    monkeypatch.setattr(datasets.CIFAR10, "meta", meta)

    for train, name in ((True, "data_batch_1"), (False, "test_batch")):
        images, labels = task.load_data(app_settings(dataset="cifar10", data_dir=str(tmp_path)), train)
        assert torch.equal(images, torch.from_numpy(arrays[name]).reshape(6, 3, 32, 32))
        assert labels.tolist() == [3, 1, 4, 1, 5, 9]


# --- models -----------------------------------------------------------------------------------------------


def test_initial_weights_depend_on_the_seed_only():
    first, again, other = (task.initial_weights(app_settings(seed=seed)) for seed in (1, 1, 2))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


# --- training and evaluation ------------------------------------------------------------------------------


def fit(weights, server_round=1, **changed):
    return task.train(weights, {"server-round": server_round}, settings=app_settings(**changed))


def evaluate(weights, **changed):
    return task.evaluate(1, weights, {}, settings=app_settings(**changed))


def test_one_fit_lowers_the_loss_and_leaves_the_arguments_alone():
    weights = task.initial_weights(app_settings())
    before = [array.copy() for array in weights]
    trained, num_examples, metrics = fit(weights)
    assert num_examples == 719
    assert metrics["train_loss"] < 1
    assert evaluate(trained)[0] < evaluate(weights)[0] / 2
    assert all(np.array_equal(a, b) for a, b in zip(before, weights, strict=True))


def test_the_same_call_gives_the_same_bits_and_another_call_different_bits():
    """The bits do not depend on random numbers that the process has drawn before."""
    weights = task.initial_weights(app_settings())
    torch.manual_seed(1)
    first = fit(weights, local_epochs=1)
    torch.manual_seed(2)
    again = fit(weights, local_epochs=1)
    assert first[1:] == again[1:]
    assert all(np.array_equal(a, b) for a, b in zip(first[0], again[0], strict=True))
    for changed in ({"seed": 1}, {"server_round": 2}, {"partition_id": 1}):
        other = fit(weights, local_epochs=1, **changed)
        assert not any(np.array_equal(a, b) for a, b in zip(first[0], other[0], strict=True))


def test_resnet18_trains_if_the_last_batch_has_a_single_example():
    changed = {"model": "resnet18", "batch_size": 71, "local_epochs": 1}
    weights = task.initial_weights(app_settings(**changed))
    trained, num_examples, metrics = fit(weights, num_partitions=20, **changed)
    assert num_examples == 72
    assert np.isfinite(metrics["train_loss"])
    assert not np.array_equal(weights[0], trained[0])
    counter = list(task.build_model("resnet18", (1, 8, 8)).state_dict()).index("bn1.num_batches_tracked")
    # BatchNorm has counted one batch and not two.
    assert trained[counter] == 1


def test_evaluation_counts_every_held_out_image_and_saves_the_model(tmp_path, monkeypatch):
    weights = fit(task.initial_weights(app_settings()))[0]
    loss, metrics = evaluate(weights)
    assert list(tmp_path.iterdir()) == []
    assert 0 < loss < 1
    assert set(metrics) == {"accuracy", "num_examples"}
    assert metrics["num_examples"] == 360
    assert metrics["accuracy"] > 0.5

    monkeypatch.setenv("FLOWER_GPU_RUN_DIR", str(tmp_path))
    assert evaluate(weights) == (loss, metrics)
    # This line is in the README.
    model = task.build_model("cnn", (1, 8, 8))
    model.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert all(np.array_equal(a, b) for a, b in zip(weights, get_weights(model), strict=True))
