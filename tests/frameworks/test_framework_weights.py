"""Weights of Keras models and JAX pytrees. Each run is a new process, since a backend is chosen only once."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from flower_gpu import frameworks
from flower_gpu.frameworks import Cap
from flower_gpu.frameworks.tensorflow import TensorFlow

FOLDER = Path(__file__).parent

pytestmark = pytest.mark.timeout(300)


def check(file: str, **env: str) -> None:
    """Run the tests in a file of this folder."""
    completed = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0", str(FOLDER / file)],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3", **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
    )
    assert completed.returncode == 0, completed.stdout
    assert " passed" in completed.stdout


@pytest.mark.parametrize("backend", ["tensorflow", "jax", "torch"])
def test_weights_of_keras_models(backend: str) -> None:
    if not (find_spec("keras") and find_spec(backend)):
        pytest.skip(f"needs Keras and {backend}")
    check("keras_weights_checks.py", KERAS_BACKEND=backend)


@pytest.mark.parametrize("x64", ["0", "1"])
def test_weights_of_jax_pytrees(x64: str) -> None:
    if not find_spec("jax"):
        pytest.skip("needs JAX")
    check("jax_weights_checks.py", JAX_ENABLE_X64=x64)


def test_an_unknown_tensorflow_is_used_without_a_cap(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A message says so, and the task's import does not fail."""
    monkeypatch.setitem(sys.modules, "tensorflow", SimpleNamespace(config=None))
    for name in [name for name in sys.modules if name.startswith("tensorflow.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(frameworks, "ALL", (TensorFlow(),))
    with frameworks.held_to([Cap(2, 4)]) as holds:
        assert holds == []
    assert "this TensorFlow is not limited to its lease" in capsys.readouterr().err


def test_modules_for_missing_frameworks_can_be_imported(run_script) -> None:
    """Their errors still name the expected type."""
    code = """
        import sys
        for name in ("tensorflow", "keras", "jax"):
            sys.modules[name] = None
        from flower_gpu.errors import WeightsError
        from flower_gpu.keras import weights
        import flower_gpu.jax.weights, flower_gpu.frameworks.tensorflow
        try:
            weights.get_weights(object())
        except WeightsError as error:
            print(error)
    """
    assert run_script(code).stdout == "expected a Keras model, got object\n"
