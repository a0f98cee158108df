"""Simulations on real Ray clusters, whose hosts are namespaces of this machine."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import cluster_hosts
import pytest
from cluster_hosts import Cluster, Run
from scripted_app import copy_of_app
from simulations import SHARED_STATE, Simulation, run
from waiting import until

from flower_gpu.leases.ledger import Ledger
from flower_gpu.leases.ledger_folder import LedgerFolder

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(300),
    pytest.mark.skipif(cluster_hosts.problem() != "", reason=f"no hosts: {cluster_hosts.problem()}"),
]

# Each round asks 32 of them: two blocks in order, one for each host.
NODES = 40
# Each worker handles many messages, because the app keeps nothing in its modules and a worker per message
# takes far longer.
MANY = ("--calls-per-worker", "1000")
# Nearly all runs have these options, so the runs of a host share a fork server.
SAME = ("--seed", "3", "--deterministic", *MANY, "--gpu", "never")
MEDIAN = ("--run-config", "strategy='median'")


class Gate:
    """A run whose clients wait in a round until the test lets them in. ``options`` are its options."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.options = (*SAME, "--run-config", f"waits-for='{folder}'")

    def let_in(self, *rounds: int) -> None:
        for number in rounds:
            (self._folder / str(number)).touch()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two hosts with a GPU each. Only the last test kills any of them."""
    folder = tmp_path_factory.mktemp("cluster")
    env = {"LEASED_APP_NOTES": str(folder / "notes.jsonl"), "LEASED_APP_GO_ON": str(folder / "go-on")}
    with Cluster(folder, gpus=1, MKL_CBWR=SHARED_STATE["MKL_CBWR"], **env) as started_cluster:
        yield started_cluster


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Simulation:
    """The same run on a single machine."""
    done = run("exact", NODES, tmp_path_factory.mktemp("alone"), *SAME)
    assert done.status == 0, done.output
    return done


def check_result(done: Run, alone: Simulation) -> None:
    """Check that a run has the model of a single machine, and that each message counts once."""
    assert done.status == 0, done.output
    assert done.summary["model_sha256"] == alone.summary["model_sha256"]
    assert done.summary["failed"] == 0 and done.summary["messages"] == alone.summary["messages"]


def wait_for_both(done: Run, event: str) -> None:
    """Wait until each host has an event of this kind."""
    done.says("Starting FedAvg")
    until(lambda: {entry["host"] for entry in done.events(event)} == {"host-0", "host-1"}, event)


def test_two_hosts_compute_the_model_of_a_single_machine(
    cluster: Cluster, alone: Simulation, tmp_path: Path
) -> None:
    gate = Gate(tmp_path)
    with cluster.running("exact", NODES, *gate.options) as done:
        wait_for_both(done, "worker_started")
        gate.let_in(1, 2, 3)
        done.wait()
    check_result(done, alone)
    hosts = done.summary["hosts"]
    assert {host["host"] for host in hosts} == {"host-0", "host-1"}
    assert sum(host["messages"] for host in hosts) == done.summary["messages"]
    assert min(host["messages"] for host in hosts) > 0 and not any(host["is_lost"] for host in hosts)
    assert {event["host"] for event in done.events("worker_finished")} == {"host-0", "host-1"}
    assert {event["host"] for event in done.events("host_joined")} == {"host-0", "host-1"}


def test_states_and_replies_that_are_not_summed(cluster: Cluster, tmp_path: Path) -> None:
    """The strategy needs all replies, and the clients keep states."""
    alone = run("exact", 10, tmp_path, *SAME, *MEDIAN)
    check_result(cluster.run("exact", 10, *SAME, *MEDIAN, name="median"), alone)


def test_a_run_goes_on_after_ctrl_c_and_after_its_driver_was_killed(
    cluster: Cluster, alone: Simulation, tmp_path: Path
) -> None:
    def no_process_remains() -> None:
        for host in cluster.hosts:
            until(lambda host=host: not host.pids("ray::Agent"), "the agents have ended")
            until(lambda host=host: not host.pids("flower-gpu: scripted"), "the workers have ended")

    gate = Gate(tmp_path)
    gate.let_in(1)
    with cluster.running("exact", NODES, *gate.options, name="ended") as first:
        first.says("round 1/3  train")
        first.send(signal.SIGINT)
        first.wait()
    assert first.status == 130 and "--resume" in first.output, first.output
    no_process_remains()
    gate.let_in(2)
    resume = (*MANY, "--gpu", "never", "--resume", str(first.folder))
    with cluster.running("exact", NODES, *resume, name="killed") as second:
        second.says("round 2/3  train")
        second.send(signal.SIGKILL)
        second.process.wait(60)
    no_process_remains()
    gate.let_in(3)
    shutil.rmtree(first.folder / "states", ignore_errors=True)
    third = cluster.run("exact", NODES, *resume, name="resumed")
    assert third.status == 0 and "Continuing after round" in third.output, third.output
    assert first.summary["model_sha256"] == alone.summary["model_sha256"]


def test_leases_of_each_host_are_its_own(cluster: Cluster, tmp_path: Path) -> None:
    table = tmp_path / "devices.toml"
    table.write_text("['*']\nnum-gpus = 0.5\n[1]\nnum-gpus = 1\n")
    options = ("--clients-table", str(table), "--gpu", "require", "--run-config", "waits=true")
    with cluster.running("leased", 6, *options, name="leased") as done:
        wait_for_both(done, "lease_granted")
        (cluster.folder / "go-on").touch()
        done.wait()
    assert done.status == 0, done.output
    granted = done.events("lease_granted")
    assert len({(event["host"], gpu["uuid"]) for event in granted for gpu in event["gpus"]}) == 2
    sizes = {(event["client"] == "1", event["gpus"][0]["memory_bytes"]) for event in granted}
    [(_, half), (_, whole)] = sorted(sizes)
    assert whole == 2 * half
    for host in cluster.hosts:
        assert not Ledger(LedgerFolder(host.folder / "stub" / "ledger")).status().holders


def test_a_host_without_a_package_is_named(cluster: Cluster, tmp_path: Path) -> None:
    app = copy_of_app(tmp_path / "app")
    client = app / "scripted" / "client_app.py"
    client.write_text("import only_there\n" + client.read_text())
    (tmp_path / "only_there.py").touch()
    path = os.pathsep.join([cluster.hosts[0].env["PYTHONPATH"], str(tmp_path)])
    done = cluster.run(app, 4, name="no-package", PYTHONPATH=path)
    assert done.status == 2 and not done.has_folder, done.output
    assert re.search("host host-[01]: the app imports only_there, which is not installed there", done.output)


def test_data_that_are_missing_on_a_host_are_named(cluster: Cluster) -> None:
    head = cluster.hosts[0]
    options = ("--preload", "os:listdir path='/dev/shm/data'", *SAME)
    # Each host has its own /dev/shm.
    subprocess.run(head.inside(["mkdir", "/dev/shm/data"]), check=True)
    done = cluster.run("exact", 4, *options, name="no-data")
    assert done.status == 2 and not done.has_folder, done.output
    assert re.search("host host-1: preload os:listdir .*/dev/shm/data", done.output), done.output


def test_an_address_without_a_cluster_is_refused(cluster: Cluster) -> None:
    address = f"127.0.0.1:{cluster_hosts.free_port()}"
    done = cluster.run("plain", 4, "--ray-address", address, name="nowhere")
    assert done.status == 2 and not done.has_folder, done.output
    assert f"--ray-address {address}: no Ray cluster can be reached" in done.output


def test_lost_agents_and_hosts_cost_only_time_and_a_new_host_is_used(
    cluster: Cluster, alone: Simulation, tmp_path: Path
) -> None:
    """An agent dies, then a whole host, and another host joins. This is the last test of this cluster."""
    gate = Gate(tmp_path)
    gate.let_in(1)
    with cluster.running("exact", NODES, *gate.options, name="dies") as done:
        done.says("round 1/3  train")
        (agent,) = cluster.hosts[0].pids("ray::Agent")
        os.kill(agent, signal.SIGKILL)
        done.says("Host host-0 is lost")
        done.says("Host host-0 has joined")
        cluster.hosts[1].end()
        cluster.add()
        done.says("Host host-2 has joined")
        gate.let_in(2, 3)
        done.wait()
    check_result(done, alone)
    hosts = {host["host"]: host for host in done.summary["hosts"]}
    assert hosts["host-1"]["is_lost"] and not hosts["host-0"]["is_lost"]
    assert hosts["host-0"]["agents_lost"] == 1 and hosts["host-2"]["messages"] > 0
    assert {event["host"] for event in done.events("host_lost")} == {"host-0", "host-1"}
