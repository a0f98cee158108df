"""examples/tensorflow runs as a federation and as a simulation, and its saved model can be loaded."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import framework_launch
import pytest
from launched import REPOSITORY, SIMULATE, Launch
from run_programs import run_python

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not find_spec("tensorflow"), reason="needs TensorFlow"),
]

LOAD = """
import sys
import keras
from sklearn.datasets import load_digits
images = (load_digits().data[:3] / 16).reshape(-1, 8, 8, 1)
print(keras.models.load_model(sys.argv[1]).predict(images, verbose=0).argmax(axis=1).tolist())
"""


def test_a_federation_learns_the_digits(launch: Launch, tmp_path: Path) -> None:
    done = framework_launch.launched(launch, "tensorflow", tmp_path)
    # Preloaded data needs the fork server, even if calls would otherwise use plain forks.
    framework_launch.check(done, "fit", "keras_digits.task:initial_weights", "forkserver")
    model = str(done.folder / "model.keras")
    loaded = run_python(LOAD, model)
    assert loaded.stdout == "[0, 1, 2]\n", loaded.stderr


def test_the_same_app_learns_in_a_simulation(launch: Launch) -> None:
    options = ("--num-supernodes", "2", "--run-config", "num-clients=2 num-server-rounds=1")
    done = launch(REPOSITORY / "examples" / "tensorflow", *options, command=SIMULATE, timeout_s=500)
    assert done.code == 0, done.output
    (last,) = done.result["rounds"]
    assert last["metrics"]["server-evaluate"]["accuracy"] >= 0.90, last
