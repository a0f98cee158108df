"""Jobs on a real Slurm: how those of `flower-gpu slurm` end, are put back, share nodes; and SuperNodes."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest
from keyed_superlink import keyed_superlink
from launched import StubHost, events_of, most_at_a_time
from live_processes import processes_with
from slurm_cluster import MISSING, Cluster, cluster
from slurm_jobs import STOPPING, submitted
from waiting import until

from flower_gpu.launch.node_keys import node_keys
from flower_gpu.launch.ports import HOST

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(240),
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)} (slurm-wlm, munge)"),
]

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "how-to" / "slurm.md"
APPS = TESTS / "simulation" / "apps"


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("slurm")) as found:
        yield found


def granted(run: Path) -> set[int]:
    """Return the GPUs that calls of a run had, by their numbers on the host."""
    return {gpu["index"] for event in events_of(run, "lease_granted") for gpu in event["gpus"]}


def test_jobs_on_gpus_that_slurm_has_chosen(slurm: Cluster, tmp_path: Path) -> None:
    """One job comes to its end, the other one fails; each has its own exit status and GPU."""
    host = StubHost(tmp_path, gpus=2)
    asked = ["--clients", "3", "--rounds", "2", "--gpu", "require", "--gpus-per-node", "1"]
    asked += ["--", "--nodelist=one"]
    good = submitted(slurm, tmp_path / "good", APPS / "plain", *asked, "--job-name", "mine", env=host.env)
    bad = submitted(slurm, tmp_path / "bad", APPS / "misspelt", *asked, env=host.env)
    assert good.status() == 0, good
    assert bad.status() == 1, bad
    assert good.summary["outcome"] == "completed"
    assert "round 2/2  train" in good.log and re.search(r"(?m)^outcome +completed$", good.log)
    assert good.shown(r"JobName=(\S+)") == "mine"
    assert sorted([*granted(good.run), *granted(bad.run)]) == [0, 1]
    assert "name 'Nett' is not defined" in bad.log


def test_a_job_that_is_put_back_goes_on_after_its_last_round(slurm: Cluster, tmp_path: Path) -> None:
    folder = tmp_path / "job"
    job = submitted(slurm, folder, STOPPING, "--clients", "2", "-c", f"folder='{folder}'")
    until((folder / "waits").exists, job)
    slurm("scontrol", "requeue", job.job)
    until(lambda: slurm.states() == ["PENDING"], "the job waits again")
    (folder / "goes-on").touch()
    slurm("scontrol", "update", f"JobId={job.job}", "StartTime=now")  # else in two minutes
    assert job.status() == 0, job
    assert (job.summary["outcome"], job.summary["resumed_after_round"]) == ("completed", 1)
    assert [row["round"] for row in job.summary["rounds"]] == [1, 2, 3]
    assert job.log.count("round 1/3  train") == job.log.count("round 3/3  train") == 1
    assert "DUE TO JOB REQUEUE" in job.log
    assert job.shown(r" Restarts=(\d+)") == "1"


def test_two_jobs_on_a_node_share_its_ledger(slurm: Cluster, tmp_path: Path) -> None:
    """Each wants 0.6 of the only GPU for a call, and neither waits for the other job's end."""
    host = StubHost(tmp_path, gpus=1)
    env = {**host.env, "LEASED_APP_NOTES": str(tmp_path / "notes.jsonl"), "PYTHONPATH": str(TESTS)}
    asked = ["--clients", "4", "--num-gpus", "0.6", "--gpu", "require", "--calls-per-worker", "1"]
    asked += ["-c", "seconds=0.1", "--", "--nodelist=two"]
    blocker = [sys.executable, str(TESTS / "cli" / "lease_user.py"), "blocker", "1", "0.6"]
    with subprocess.Popen(
        blocker, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **host.env}, text=True
    ) as holds:
        first = submitted(slurm, tmp_path / "first", APPS / "leased", *asked, env=env)
        second = submitted(slurm, tmp_path / "second", APPS / "leased", *asked, env=env)
        until(lambda: len(host.status().waiting) == 2, "both jobs wait for the GPU")
        assert slurm.states("%T", "%N") == ["RUNNING two"] * 2
        holds.communicate()
    assert (first.status(), second.status()) == (0, 0), f"{first}{second}"
    calls = [
        [e for e in events_of(job.run, "worker_started", "worker_finished") if e["client"] != "server"]
        for job in (first, second)
    ]
    assert most_at_a_time(sorted(chain(*calls), key=lambda event: event["time"])) == 1
    (began, *_, ended), (other_began, *_, other_ended) = ([e["time"] for e in found] for found in calls)
    assert began < other_ended and other_began < ended, "they take turns"
    notes = [json.loads(line) for line in (tmp_path / "notes.jsonl").read_text().splitlines()]
    assert [(note["holders"], note["is_in_ledger"]) for note in notes] == [(1, True)] * 8


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray")
def test_two_jobs_on_the_same_nodes_have_a_ray_each(slurm: Cluster, tmp_path: Path) -> None:
    folders = tmp_path / "first", tmp_path / "second"
    # With little of a core for each client: those of one job do not wait for those of the other one.
    asked = ["--clients", "4", "--num-cpus", "0.1", "--nodes", "2", "-c"]
    jobs = [submitted(slurm, folder, STOPPING, *asked, f"folder='{folder}'") for folder in folders]
    for folder, job in zip(folders, jobs, strict=True):
        until((folder / "waits").exists, job)
    assert slurm.states("%T", "%D") == ["RUNNING 2"] * 2
    for folder, job in zip(folders, jobs, strict=True):
        (folder / "goes-on").touch()
        assert job.status() == 0, job
    for job in jobs:
        hosts = job.summary["hosts"]
        assert [host["is_lost"] for host in hosts] == [False, False]
        assert sum(host["messages"] for host in hosts) == job.summary["messages"] == 12
    assert len({(job.folder / f"runs/slurm-{job.job}/ray/started-0").read_text() for job in jobs}) == 2
    until(lambda: not processes_with("RAY_AUTH_TOKEN_PATH", tmp_path), "nothing of either Ray is left")


def test_supernodes_are_started_as_the_page_says(slurm: Cluster, tmp_path: Path) -> None:
    script = re.search(r"```bash\n(#!/bin/bash\n.*?)```", PAGE.read_text(), re.DOTALL)
    assert script is not None
    with keyed_superlink(tmp_path) as superlink:
        text = script[1].replace("fl.example.org:8000", f"{HOST}:{superlink.port}")
        text = re.sub(r"--nodes=\d+", "--nodes=2", text)
        text = re.sub(r"--cpus-per-task=\d+", "--cpus-per-task=1", text)
        (tmp_path / "supernodes.sh").write_text(text)
        for number in range(2):  # else the first job makes them, and asks again and again
            for key in node_keys(tmp_path / "keys" / str(number), 2):
                superlink.flwr(key.register_command)
        env = {**superlink.env, **slurm.env, "PATH": f"{superlink.env['PATH']}:{slurm.env['PATH']}"}
        subprocess.run(["sbatch", "supernodes.sh"], cwd=tmp_path, env=env, check=True, timeout=60)
        until(lambda: [node["status"] for node in superlink.nodes()] == ["online"] * 4, "all are let in")
        slurm("scancel", "--name=supernodes.sh")
        until(lambda: not processes_with("FLOWER_GPU_RUN_DIR", tmp_path), "all SuperNodes have ended")
