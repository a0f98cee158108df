"""Jobs on several nodes of a real Slurm: a simulation with Ray, and SuperNodes."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from keyed_superlink import keyed_superlink
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

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "slurm.md"


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("slurm")) as found:
        yield found


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
        text = script[1].replace("fl.example.org:9092", f"{HOST}:{superlink.port}")
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
