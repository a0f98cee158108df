"""examples/jax runs as a federation with Flower's Message API."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import framework_launch
import pytest
from launched import Launch


@pytest.mark.e2e
@pytest.mark.timeout(600)
@pytest.mark.skipif(not (find_spec("jax") and find_spec("optax")), reason="needs JAX and Optax")
def test_a_federation_learns_the_digits(launch: Launch, tmp_path: Path) -> None:
    done = framework_launch.launched(launch, "jax", tmp_path)
    framework_launch.check(done, "train", "jax_digits.task:initial_weights", "fork")
