"""`flower-gpu simulate` with real apps: its results, and failures that do not end the run."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from file_tables import files_in, files_in_table
from safetensors.numpy import load_file
from scripted_app import APP
from simulations import Simulation, run, running, wait_for_line

from flower_gpu import simulate, trace
from flower_gpu.apps.folder import in_use
from flower_gpu.errors import ConfigError
from flower_gpu.watch.report.page import write_report

pytestmark = pytest.mark.timeout(300)

FOUR_ROUNDS = ("--run-config", "num-server-rounds=4")


def model(folder: Path) -> np.ndarray:
    (array,) = load_file(folder / "model.safetensors").values()
    return array


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> Simulation:
    """A finished run of four clients and two rounds."""
    options = ("--seed", "2", "--calls-per-worker", "1")
    done = run("plain", 4, tmp_path_factory.mktemp("complete"), *options)
    assert done.status == 0, done.output
    return done


def test_the_tables_of_files_in_the_docs_are_complete(complete: Simulation) -> None:
    there = files_in(complete.folder)
    reference = files_in_table("reference/simulate.md", "## The folder of a run")
    guide = files_in_table("how-to/simulate.md", "## The results")
    assert there <= reference
    # This run has no reason for these files: no client fails, a few clients have little state, it runs
    # outside a notebook, has no tracker and no MPS, and no report is requested.
    without_reason = {"failures.log", "states/", "report.html"}
    assert reference - there <= without_reason | {"run.log", "tensorboard/", "wandb/", "mps/"}
    assert guide - there <= {"failures.log", "report.html"}


@pytest.fixture
def folder(complete: Simulation, tmp_path: Path) -> Path:
    """A copy of the folder of a finished run, for this test only."""
    return Path(shutil.copytree(complete.folder, tmp_path / "runs" / complete.folder.name))


def test_lines_of_clients_are_attributed_to_them(complete: Simulation) -> None:
    """Each line names its client, here and in a file. The lines of a client are in their order."""
    printed = (complete.folder / "clients.log").read_text()
    for partition in range(4):
        names = [f"client {partition}, round {number}: " for number in (1, 2)]
        expected = [name + text for name in names for text in (*[f"partition {partition}"] * 2, "100 %")]
        for text in (printed, complete.output):
            lines = [line for line in text.splitlines() if line.startswith(f"client {partition}, round")]
            assert lines == expected
    assert len(printed.splitlines()) == 24


def test_each_message_has_its_own_worker_and_states_are_kept(complete: Simulation) -> None:
    assert len({call["pid"] for call in complete.calls}) == len(complete.calls) == 8
    # These are means over all clients.
    for part in complete.parts("train"):
        assert part.metrics["calls"] == pytest.approx(part.round)
    assert complete.summary["outcome"] == "completed" and complete.summary["workers_started"] == 8
    assert [part.round for part in complete.parts("server-evaluate")] == [0, 1, 2]


def test_reused_workers_give_the_same_model(complete: Simulation, tmp_path: Path) -> None:
    done = run("plain", 4, tmp_path, "--seed", "2", "--max-workers", "1", "--calls-per-worker", "8")
    assert done.status == 0, done.output
    assert max(Counter(call["pid"] for call in done.calls).values()) > 1
    assert done.summary["recycling"] == {"calls_per_worker": 8, "is_used_again": True}
    assert model(done.folder).tobytes() == model(complete.folder).tobytes()


def test_no_socket_is_left_to_the_garbage_collector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONWARNINGS", "always::ResourceWarning")
    done = run("plain", 2, tmp_path, "--calls-per-worker", "1", "--client-output", "all")
    assert done.status == 0, done.output
    assert "partition 1" in done.output, "the output of workers is shown"
    assert "ResourceWarning" not in done.output, done.output


def test_clients_may_start_processes(tmp_path: Path) -> None:
    """They use pools whose processes import the app's modules again."""
    done = run("plain", 2, tmp_path, "--run-config", "train='pool' num-server-rounds=1")
    assert done.status == 0, done.output
    assert done.summary["outcome"] == "completed", done.output
    assert done.parts("train")[0].metrics["total"] == 14


def test_failing_clients_are_named_and_the_run_completes(tmp_path: Path) -> None:
    config = "raises-on='0 3 6' dies-on='4' hangs-on='5'"
    options = ("--run-config", config, "--timeout-s", "3", "--calls-per-worker", "2")
    done = run("plain", 9, tmp_path, *options)
    assert done.status == 0, done.output
    assert done.summary["messages"] == 18 and done.summary["failed"] == 10
    failed = [message for reason in done.summary["failures"] for message in reason["messages"]]
    errors = {(message["round"], message["client"]): message["error"] for message in failed}
    for server_round in (1, 2):
        for client in (0, 3, 6):
            assert f"no data in partition {client}" in errors[server_round, client]
        assert "SIGKILL" in errors[server_round, 4]
        assert "timeout_s=3" in errors[server_round, 5] and "in train" not in errors[server_round, 0]
    assert "client 4" in done.output and "client 5" in done.output
    outcome = "completed, 10 of 18 messages failed"
    assert done.summary["outcome"] == outcome
    assert re.search(f"^outcome +{outcome}$", done.output, re.MULTILINE)
    assert f'<p class="outcome partly">{outcome}' in write_report(done.folder).read_text()


def test_a_completed_run_is_extended_killed_and_resumed_with_the_same_model(
    folder: Path, tmp_path: Path
) -> None:
    with (
        in_use(folder / trace.FILE_NAME),
        pytest.raises(ConfigError, match="another process continues the run"),
    ):
        simulate(APP, 4, resume=folder, progress=False)
    with pytest.raises(ConfigError, match=r"num_supernodes \(--clients\) was 4 and is 5"):
        simulate(APP, 5, resume=folder, progress=False)
    longer = run("plain", 4, tmp_path / "longer", "--seed", "2", *FOUR_ROUNDS)
    resume = (*FOUR_ROUNDS, "--resume", str(folder))
    with running("plain", 4, None, *resume) as process:
        wait_for_line(process, "round 3/4")
        os.kill(process.pid, signal.SIGKILL)
        process.wait(60)
    again = run("plain", 4, folder.parent, *resume)
    assert longer.status == again.status == 0, longer.output + again.output
    assert again.summary["resumed_after_round"] in (2, 3)
    assert model(folder).tobytes() == model(longer.folder).tobytes()
    tables = [(path / "metrics.csv").read_text() for path in (folder, longer.folder)]
    assert tables[0] == tables[1]


@pytest.mark.parametrize(
    ("run_config", "text"),
    [
        (
            {"strategy": "fedavg"},
            "this run cannot continue with flwr.serverapp.strategy.FedAvg: its checkpoint is one of "
            "flower_gpu.FedAvg. Give",
        ),
        (
            {"strategy": "derived"},
            "this run cannot continue with Derived, because its state is not known. Flower's own strategies",
        ),
        (
            {"num-server-rounds": 1},
            "nothing is left to do: the run has finished 2 rounds, and is asked for 1. Ask for more than 2",
        ),
    ],
)
def test_a_refused_resume_leaves_the_earlier_run_unchanged(
    run_config: dict[str, object], text: str, folder: Path
) -> None:
    original = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    with pytest.raises(ConfigError, match=re.escape(text)):
        simulate(APP, 4, run_config=run_config, resume=folder, progress=False)
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == original


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 300 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(folder)]
    if os.getuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("only root can mount a disk")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_is_reported_with_consistent_numbers(small_disk: Path) -> None:
    """The checkpoint of the model before round 1 fills the disk."""
    done = run("plain", 4, small_disk, "--run-config", "elements=76_000")
    last = done.output.splitlines()[-1]
    assert done.status == 1 and last.startswith("flower-gpu simulate: the disk is full"), last
    assert done.output.count("the disk is full") == 1 and "Traceback" not in done.output, done.output
    assert "there is no checkpoint of an earlier one" in last
    sizes = re.search(r"has no room for (\d+) KiB more, and (\d+) KiB are free", last)
    assert sizes and int(sizes[1]) > int(sizes[2]), last
    assert done.summary["outcome"] == "failed" and "outcome" in done.output
