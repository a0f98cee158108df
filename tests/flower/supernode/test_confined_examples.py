"""Ordinary apps under ``flower-gpu supernode --confine``, with their data named."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from launched import REPOSITORY, events_of
from supernode_host import Federation, logs_of, results_of

from flower_gpu.workers import confinement

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(400),
    pytest.mark.skipif(confinement.problem() is not None, reason=f"no confinement: {confinement.problem()}"),
]
CONFINED = ("--confine", "--gpu", "never")
EXAMPLES = ("tensorflow", "jax")


def federation(folder: Path) -> Federation:
    fed = Federation(folder)
    fed.env["FLOWER_GPU_SERVER_IDLE_S"] = "2"  # its end is waited for
    return fed


@pytest.mark.skipif(any(map(find_spec, EXAMPLES)), reason="an app of PyTorch, in an environment of others")
def test_an_app_of_pytorch_trains_on_data_of_the_operator(tmp_path: Path) -> None:
    named, other = tmp_path / "named", tmp_path / "other"
    labels = torch.arange(64) % 4
    for folder in (named, other):
        folder.mkdir()
        for partition in range(2):
            torch.save((torch.eye(4).repeat(1, 4)[labels], labels), folder / f"{partition}.pt")
    with federation(tmp_path) as fed:
        nodes = fed.supernodes(2, *CONFINED, "--data-dir", str(named))
        run = fed.run(data_folder=str(named), num_server_rounds=2)
        assert run.wait(200) == 0, run.output
        for server_round in (1, 2):
            assert results_of(run, server_round) == ("2 results and 0 failures", [])
        losses = [float(loss) for loss in re.findall(r"'train_loss': ([0-9.]+)", run.server_output)]
        assert losses[0] > losses[1], run.server_output
        assert f"apps are confined; they may also read {named}. " in nodes.output
        counted, errors = results_of(fed.run(data_folder=str(other)), 1)
        assert counted == "0 results and 2 failures"
        assert all("PermissionError" in error and f"{other}/" in error for error in errors), errors


@pytest.mark.skipif(not all(map(find_spec, EXAMPLES)), reason="needs TensorFlow and JAX")
def test_the_examples_of_tensorflow_and_jax_learn_the_digits(tmp_path: Path) -> None:
    """Theirs come with scikit-learn, in the Python environment."""
    fed = federation(tmp_path)
    fed.env["FLOWER_GPU_RUN_DIR"] = str(fed.trace)  # of the server, which evaluates
    with fed:
        nodes = fed.supernodes(1, *CONFINED)
        for example in EXAMPLES:
            run = fed.run(REPOSITORY / "examples" / example, num_clients=1, num_server_rounds=1)
            assert run.wait(300) == 0, run.output
            [*_, evaluated] = events_of(fed.trace, "round")
            assert (evaluated["round"], evaluated["metrics"]["accuracy"] > 0.9) == (1, True), evaluated
        folder = logs_of(fed, nodes)
        assert [event["task"] for event in events_of(folder, "worker_finished")] == ["train", "train"]
        assert not events_of(folder, "client_failed")
