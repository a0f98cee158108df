"""An unchanged PyTorch app on SuperNodes of a host with stub GPUs: its workers see only their leases.

Processes of these SuperNodes also get SIGKILL, SIGTERM and Ctrl-C in the middle of a round.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterable
from pathlib import Path

import pytest
from launched import events_of
from live_processes import is_running, processes_with
from nvml_stub import GIB
from supernode_host import APP, Federation, Message, logs_of, results_of, sights
from waiting import until

from flower_gpu.options import RESERVE

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not Path("/proc/self/fdinfo").exists(), reason="the fork server needs Linux"),
]

TOTAL = 16 * GIB
SIZE = ("--gpu-memory", "6GiB")


def all_paused(fed: Federation, server_round: int, clients: int) -> dict[int, Message]:
    """Wait until all messages of a round are in their workers. Returns their processes by client."""

    def in_workers() -> bool:
        paused = fed.paused_workers(server_round)
        workers = {message.worker for message in fed.messages()}
        return len(paused) == clients and workers >= set(paused.values())

    until(in_workers, f"all {clients} messages of round {server_round} train")
    assert len(fed.holders()) == clients
    messages = {message.worker: message for message in fed.messages()}
    return {client: messages[worker] for client, worker in fed.paused_workers(server_round).items()}


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def until_gone(pids: Iterable[int], name: str) -> None:
    until(lambda: not any(map(is_running, pids)), f"{name} is gone")


def until_leases(fed: Federation, count: int) -> None:
    until(lambda: len(fed.holders()) == count, f"there are {count} leases")


def supernode_of(folder: Path, client: int) -> int:
    """Return the pid of the SuperNode with this partition whose logs are in a folder."""
    commands = processes_with("FLOWER_GPU_RUN_DIR", folder)
    [pid] = [pid for pid, command in commands.items() if f"partition-id={client} " in command]
    return pid


def fork_servers(fed: Federation) -> list[int]:
    """Return the pids of all fork servers, also of one that has a successor and only serves its workers."""
    forked = {pid for message in fed.messages() for pid in message}
    return [
        pid
        for pid, command in fed.processes().items()
        if "flower_gpu.workers.forkserver" in command and pid not in forked
    ]


def assert_workers_saw_their_leases(folder: Path) -> None:
    """Check the reports of the app's processes against the leases of their messages, and the caps."""
    granted = {event["lease"]: event for event in events_of(folder, "lease_granted")}
    started = {event["pid"]: event for event in events_of(folder, "worker_started")}
    seen = [sight for log in folder.glob("supernode-*.log") for sight in sights(log.read_text())]
    assert len(seen) == len(started) == len(granted)
    for sight in seen:
        worker = started[sight["pid"]]
        lease = granted[worker["lease"]]
        assert worker["client"] == lease["client"] == str(sight["partition"])
        assert worker["task"] == lease["task"] == "train"
        [gpu] = lease["gpus"]
        assert sight["CUDA_VISIBLE_DEVICES"] == gpu["uuid"]
        name, _, fraction = sight["PYTORCH_ALLOC_CONF"].partition(":")
        assert name == "per_process_memory_fraction"
        # PyTorch may take the lease minus the memory of the CUDA context.
        assert 0 < gpu["memory_bytes"] - float(fraction) * TOTAL < GIB
        assert sight["PYTORCH_CUDA_ALLOC_CONF"] is None
    capped = [gpu for event in events_of(folder, "worker_finished") for gpu in event.get("gpus", ())]
    assert capped
    for gpu in capped:
        assert gpu["lease_bytes"] == 6 * GIB > gpu["cap_bytes"] > 5 * GIB


def test_the_app_does_not_mention_flower_gpu() -> None:
    for path in APP.rglob("*.py"):
        assert not re.search(r"flower.gpu", path.read_text(), re.IGNORECASE), path


def test_supernodes_share_two_gpus_and_killed_processes_do_not_affect_the_next_round(tmp_path: Path) -> None:
    """Ctrl-C and SIGTERM leave no process or lease behind, and other SuperNodes continue."""
    with Federation(tmp_path) as fed:
        fed.host.set(1, used=6 * GIB)  # so there is room for only three of the four messages
        launcher = fed.supernodes(3, *SIZE)
        other = fed.supernodes(1, *SIZE, flower=("--node-config", "partition-id=3"))
        until(lambda: fed.users_of_fork_servers() == 4, "each SuperNode keeps the fork server running")
        run = fed.run(num_clients=4, num_server_rounds=3, pause_folder=str(fed.pauses))

        # Round 1 checks the leases. A worker and the fork servers are killed. Running messages need no fork
        # server.
        with fed.host.observed() as looks:
            messages = all_paused(fed, 1, 3)
            until(lambda: len(fed.waiting()) == 1, "the last message waits for a lease")
            killed, *others = messages
            kill(messages[killed].worker)
            until_gone(messages[killed], "its message")
            until(
                lambda: not fed.waiting() and len(fed.paused_workers(1)) == 4,
                "the last message trains in its place",
            )
            until_leases(fed, 3)
            servers = fork_servers(fed)
            assert servers
            for pid in servers:
                kill(pid)
            until_gone(servers, "each fork server")
            assert all(is_running(pid) for client in others for pid in messages[client])
            fed.host.set(1, used=0)
            fed.resume(1)
            counted, [reason] = results_of(run, 1)
            assert counted == "3 results and 1 failures"
            assert f"train of client {killed}: the worker" in reason and "was killed by SIGKILL (9)" in reason

        # In round 2, a SuperNode and a launcher are killed.
        messages = all_paused(fed, 2, 4)
        assert not set(fork_servers(fed)) & set(servers)
        supernode = supernode_of(logs_of(fed, launcher), 2)
        kill(supernode)
        until_gone([supernode, *messages[2]], "the SuperNode with its message")
        until_leases(fed, 3)
        until(
            lambda: "SuperNode 2 ended with SIGKILL (-9); it is" in launcher.output, "the restart is logged"
        )

        logs = logs_of(fed, other)
        assert processes_with("FLOWER_GPU_RUN_DIR", logs)
        kill(other.pid)
        until(
            lambda: not processes_with("FLOWER_GPU_RUN_DIR", logs), "all processes of the launcher have ended"
        )
        until_gone(messages[3], "its message")
        until_leases(fed, 2)
        assert all(map(is_running, messages[0])), "processes of other launchers continue"
        single = fed.runs / "single"
        single.mkdir()
        again = fed.supernode(*SIZE, node_config="partition-id=3", env={"FLOWER_GPU_RUN_DIR": str(single)})
        fed.resume(2)
        counted, reasons = results_of(run, 2)
        assert counted == "2 results and 2 failures"
        assert all("Node Unavailable" in reason for reason in reasons), reasons

        # In round 3, a SuperNode gets SIGTERM, and a launcher with its SuperNodes gets Ctrl-C.
        messages = all_paused(fed, 3, 4)
        ends = (
            (again, signal.SIGTERM, single, (3,)),
            (launcher, signal.SIGINT, logs_of(fed, launcher), (0, 1, 2)),
        )
        for process, number, folder, clients in ends:
            assert processes_with("FLOWER_GPU_RUN_DIR", folder)
            process.send(number)
            assert process.wait(60) == 0
            until(
                lambda at=folder: not processes_with("FLOWER_GPU_RUN_DIR", at), "all its processes have ended"
            )
            until_gone([pid for client in clients for pid in messages[client]], "each message")
            until_leases(fed, 3 if process is again else 0)
            others = (0, 1, 2) if process is again else ()
            assert all(is_running(pid) for client in others for pid in messages[client]), "others continue"
        assert fork_servers(fed), "it stays for later SuperNodes"
        assert fed.start("stop", "flower-gpu", "workers", "stop", "--if-unused").wait(60) == 0
        until(lambda: not fork_servers(fed), "the unused fork server has stopped")
        assert all(path.startswith("state/") for path in fed.files())
        assert not fed.holders()

    for text in ("connected: 3 of 3 SuperNodes", "Option `--insecure` was set"):
        assert launcher.output.count(text) == 1, "the launcher merges the logs of all three"
    folder = logs_of(fed, launcher)
    assert_workers_saw_their_leases(folder)
    assert len(events_of(folder, "worker_started")) == 3 * 3
    granted = [event for at in (folder, logs, single) for event in events_of(at, "lease_granted")]
    assert len(granted) == 3 * 4
    per_gpu = [sum(gpus.get(uuid, 0) for gpus in look.values()) for look in looks for uuid in fed.host.uuids]
    assert max(per_gpu) == 12 * GIB <= TOTAL - RESERVE.resolve(), "two leases on a GPU, and never three"
    assert set().union(*looks) <= {event["lease"] for event in granted}, "all leases are in the trace"
