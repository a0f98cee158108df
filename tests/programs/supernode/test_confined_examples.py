"""The examples of TensorFlow and JAX under ``flower-gpu supernode --confine``."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from launched import REPOSITORY, events_of
from supernode_host import Federation, logs_of

from flower_gpu.workers import confinement

EXAMPLES = ("tensorflow", "jax")

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(400),
    pytest.mark.skipif(confinement.problem() is not None, reason=f"no confinement: {confinement.problem()}"),
    pytest.mark.skipif(not all(map(find_spec, EXAMPLES)), reason="needs TensorFlow and JAX"),
]


def test_confined_examples_learn_the_digits(tmp_path: Path) -> None:
    """The digits come with scikit-learn, so they are part of the Python environment."""
    fed = Federation(tmp_path)
    fed.env["FLOWER_GPU_RUN_DIR"] = str(fed.trace)  # for the events of the server, which evaluates
    with fed:
        nodes = fed.supernodes(1, "--confine", "--gpu", "never")
        for example in EXAMPLES:
            run = fed.run(REPOSITORY / "examples" / example, num_clients=1, num_server_rounds=1)
            assert run.wait(300) == 0, run.output
            [*_, evaluated] = events_of(fed.trace, "round")
            assert (evaluated["round"], evaluated["metrics"]["accuracy"] > 0.9) == (1, True), evaluated
        folder = logs_of(fed, nodes)
        assert [event["task"] for event in events_of(folder, "worker_finished")] == ["train", "train"]
        assert not events_of(folder, "client_failed")
