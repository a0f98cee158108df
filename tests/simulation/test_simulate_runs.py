"""`flower-gpu simulate` with real apps: what comes out, and what goes wrong without ending the run."""

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
from simulations import Simulation, run, running, wait_for_line

from flower_gpu.apps.registry import registered

pytestmark = pytest.mark.timeout(300)


def model(folder: Path) -> np.ndarray:
    safetensors = (
        pytest.importorskip("safetensors.numpy") if (folder / "model.safetensors").exists() else None
    )
    if safetensors is not None:
        (array,) = safetensors.load_file(folder / "model.safetensors").values()
    else:
        with np.load(folder / "model.npz") as loaded:
            (array,) = (loaded[name] for name in loaded.files)
    return array


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> Simulation:
    """A run of four clients that has ended."""
    done = run("plain", 4, tmp_path_factory.mktemp("complete"), "--seed", "2")
    assert done.status == 0, done.output
    return done


def test_tables_of_files_are_true(complete: Simulation) -> None:
    there = files_in(complete.folder)
    reference = files_in_table("reference/simulate.md", "## The folder of a run")
    guide = files_in_table("how-to/simulate.md", "## The results")
    assert there <= reference
    # What this run has no reason for: nobody fails, few clients have little state, and there is one model.
    assert reference - there <= {"failures.log", "states/", "model.safetensors", "model.npz"}
    assert guide - there <= {"failures.log", "model.safetensors", "model.npz"}


@pytest.fixture
def folder(complete: Simulation, tmp_path: Path) -> Path:
    """The folder of a run that has ended; the test's own."""
    return Path(shutil.copytree(complete.folder, tmp_path / "runs" / complete.folder.name))


def test_each_message_has_its_own_worker_and_states_are_kept(tmp_path: Path) -> None:
    done = run("plain", 6, tmp_path, "--run-config", "num-server-rounds=3", "--seed", "1")
    assert done.status == 0, done.output
    assert len({call["pid"] for call in done.calls}) == len(done.calls) == 18
    for line in done.lines("train"):  # means over all clients
        assert line["metrics"]["calls"] == pytest.approx(line["round"])
        assert line["metrics"]["calls-in-process"] == pytest.approx(1)
    assert done.summary["outcome"] == "completed" and done.summary["workers_started"] == 18
    assert [line["round"] for line in done.lines("server-evaluate")] == [0, 1, 2, 3]


def test_the_same_seed_gives_the_same_model(tmp_path: Path) -> None:
    options = ("--run-config", "fraction-train=0.5", "--seed", "7")
    first = run("plain", 8, tmp_path / "a", *options)
    second = run("plain", 8, tmp_path / "b", *options, "--max-workers", "1")
    other = run("plain", 8, tmp_path / "c", *options[:2], "--seed", "8")
    assert model(first.folder).tobytes() == model(second.folder).tobytes()
    assert model(first.folder).tobytes() != model(other.folder).tobytes()


def test_streamed_average_is_that_of_flower(tmp_path: Path) -> None:
    ours = run("plain", 10, tmp_path / "ours", "--seed", "3")
    flowers = run("plain", 10, tmp_path / "flower", "--seed", "3", "--run-config", "strategy='fedavg'")
    np.testing.assert_allclose(model(ours.folder), model(flowers.folder), rtol=1e-6)


@pytest.mark.parametrize("strategy", ["fedadam", "krum", "adaptive-dp"])
def test_strategies_that_need_all_replies_get_them(strategy: str, tmp_path: Path) -> None:
    done = run("plain", 5, tmp_path, "--run-config", f"strategy='{strategy}'")
    assert done.status == 0, done.output
    assert done.summary["failed"] == 0 and done.summary["rounds"] == 2
    assert np.all(np.isfinite(model(done.folder)))


def test_workers_are_used_again_within_a_round_only(tmp_path: Path) -> None:
    done = run("plain", 9, tmp_path, "--calls-per-worker", "3", "--max-workers", "1")
    assert done.status == 0, done.output
    pids = [call["pid"] for call in done.calls]
    first, second = pids[: len(pids) // 2], pids[len(pids) // 2 :]
    assert set(first).isdisjoint(second)
    assert Counter(second) == dict.fromkeys(second, 3)


def test_used_workers_are_compared_with_new_ones(tmp_path: Path) -> None:
    done = run("plain", 9, tmp_path, "--calls-per-worker", "9", "--max-workers", "1", "--verify-recycling")
    assert done.status == 0, done.output
    assert done.summary["recycling"]["compared"] == 3
    assert done.summary["recycling"]["different_clients"] == []


def test_clients_start_processes_of_their_own(tmp_path: Path) -> None:
    """Pools of all kinds, and a DataLoader with workers."""
    pytest.importorskip("torch")
    done = run("children", 4, tmp_path)
    assert done.status == 0, done.output
    assert done.summary["outcome"] == "completed", done.output
    assert done.lines("train")[0]["metrics"]["total"] == 14


def test_failing_clients_are_named_and_the_run_ends_well(tmp_path: Path) -> None:
    done = run("unruly", 9, tmp_path, "--timeout-s", "3", "--calls-per-worker", "2")
    assert done.status == 0, done.output
    assert done.summary["messages"] == 18 and done.summary["failed"] == 10
    errors = {(line["round"], line["client"]): line["error"] for line in done.lines("failure")}
    for server_round in (1, 2):
        for client in (0, 3, 6):
            assert f"no data in partition {client}" in errors[server_round, client]
        assert "SIGKILL" in errors[server_round, 4]
        assert "timeout_s=3" in errors[server_round, 5] and "in train" not in errors[server_round, 0]
    assert "client 4" in done.output and "client 5" in done.output
    assert done.summary["outcome"] == "completed, 10 of 18 messages failed"


def test_killed_in_a_round_and_resumed_it_is_as_if_it_had_never_been(tmp_path: Path) -> None:
    options = ("--run-config", "num-server-rounds=6 fraction-train=0.5 elements=300000", "--seed", "5")
    undisturbed = run("plain", 12, tmp_path / "undisturbed", *options)
    with running("plain", 12, tmp_path / "killed", *options) as process:
        wait_for_line(process, "round 3/6")
        os.kill(process.pid, signal.SIGKILL)
        process.wait(30)
    (folder,) = (tmp_path / "killed").iterdir()
    done = run("plain", 12, tmp_path / "killed", *options, "--resume", str(folder))
    assert done.status == 0, done.output
    assert model(folder).tobytes() == model(undisturbed.folder).tobytes()
    tables = [(path / "metrics.csv").read_text() for path in (folder, undisturbed.folder)]
    assert tables[0].count("\n") == tables[1].count("\n")

    assert done.lines("train")[-1]["metrics"]["calls"] == undisturbed.lines("train")[-1]["metrics"]["calls"]


def test_other_strategies_are_refused_at_the_start_of_a_resume(tmp_path: Path) -> None:
    first = run("plain", 4, tmp_path, "--run-config", "strategy='fedadam'")
    assert first.status == 0
    again = run("plain", 4, tmp_path, "--run-config", "strategy='fedadam'", "--resume", str(first.folder))
    assert again.status == 2
    assert "no checkpoint" in again.output and "FedAvg" in again.output


def test_a_refused_resume_leaves_the_earlier_run_as_it_was(folder: Path) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    again = run("plain", 4, folder.parent, "--run-config", "strategy='fedavg'", "--resume", str(folder))
    assert again.status == 2 and "only flower_gpu's FedAvg" in again.output
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before


def test_two_processes_do_not_go_on_with_one_run(folder: Path) -> None:
    more = ("--run-config", "num-server-rounds=4", "--resume", str(folder))
    with registered(folder, "simulate", "the other one"):
        again = run("plain", 4, folder.parent, *more)
    assert again.status == 2 and "another process goes on with this run" in again.output


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


@pytest.mark.parametrize(
    ("elements", "kept"),
    [(75_000, "there is no checkpoint of an earlier one"), (60_000, "which is that of the round before")],
    ids=["first", "later"],
)
def test_a_full_disk_is_told_with_numbers_that_agree(elements: int, kept: str, small_disk: Path) -> None:
    """The first checkpoint is that of the model before round 1; the next one takes as much again."""
    done = run("plain", 4, small_disk, "--run-config", f"elements={elements}")
    last = done.output.splitlines()[-1]
    assert done.status == 1 and last.startswith("flower-gpu simulate: FlowerGPUError: the disk is full"), last
    assert kept in last
    found = re.search(r"has no room for (\d+) KiB more, and (\d+) KiB are free", last)
    assert found and int(found[1]) > int(found[2]), last
    assert done.summary["outcome"] == "failed" and "outcome" in done.output


def test_a_run_that_is_complete_goes_on_for_more_rounds(folder: Path, tmp_path: Path) -> None:
    more = ("--run-config", "num-server-rounds=4")
    with registered(folder, "simulate", "the other one"):
        pass  # it went on with this run, and has ended
    again = run("plain", 4, folder.parent, *more, "--resume", str(folder))
    assert again.status == 0, again.output
    at_once = run("plain", 4, tmp_path / "long", "--seed", "2", *more)
    assert model(folder).tobytes() == model(at_once.folder).tobytes()


def test_a_strategy_that_waits_for_more_nodes_is_told(tmp_path: Path) -> None:
    done = run("plain", 1, tmp_path)
    assert done.status == 2 and "waits for 2 nodes, and there are 1" in done.output


def test_another_number_of_nodes_cannot_resume_a_run(folder: Path) -> None:
    again = run("plain", 5, folder.parent, "--resume", str(folder))
    assert again.status == 2 and "num_supernodes" in again.output


def test_ctrl_c_ends_it_and_says_how_to_go_on(tmp_path: Path) -> None:
    with running("plain", 20, tmp_path, "--run-config", "num-server-rounds=1000") as process:
        wait_for_line(process, "round 1/1000")
        os.killpg(process.pid, signal.SIGINT)
        output, _ = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "--resume" in output and "Traceback" not in output
