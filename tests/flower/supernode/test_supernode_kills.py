"""SIGKILL, SIGTERM and Ctrl-C for processes of SuperNodes, in the middle of a round."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from pathlib import Path

import pytest
from launched import events_of
from live_processes import is_running, processes_with
from supernode_host import Federation, Message, logs_of, results_of
from waiting import until

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not Path("/proc/self/fdinfo").exists(), reason="there is no fork server but on Linux"),
]

SIZE = ("--gpu-memory", "4GiB")


def all_held(fed: Federation, server_round: int, clients: int) -> dict[int, Message]:
    """Wait until all messages of a round are in their workers; returns their processes by client."""

    def in_workers() -> bool:
        held = fed.held(server_round)
        return len(held) == clients and {one.worker for one in fed.messages()} >= set(held.values())

    until(in_workers, f"all {clients} messages of round {server_round} train")
    assert len(fed.holders()) == clients
    messages = {one.worker: one for one in fed.messages()}
    return {client: messages[worker] for client, worker in fed.held(server_round).items()}


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def until_gone(pids: Iterable[int], what: str) -> None:
    until(lambda: not any(map(is_running, pids)), f"{what} is gone")


def until_leases(fed: Federation, count: int) -> None:
    until(lambda: len(fed.holders()) == count, f"there are {count} leases")


def supernode_of(folder: Path, client: int) -> int:
    """Return the SuperNode with this partition whose logs are in a folder."""
    commands = processes_with("FLOWER_GPU_RUN_DIR", folder)
    [pid] = [pid for pid, command in commands.items() if f"partition-id={client} " in command]
    return pid


def fork_servers(fed: Federation) -> list[int]:
    """Return those that run, also one that has a successor and is there for its workers only."""
    forked = {pid for message in fed.messages() for pid in message}
    return [
        pid
        for pid, command in fed.processes().items()
        if "flower_gpu.workers.forkserver" in command and pid not in forked
    ]


def test_whatever_is_killed_the_round_ends_and_the_next_one_works(tmp_path: Path) -> None:
    """And Ctrl-C and SIGTERM leave nothing, while others go on."""
    with Federation(tmp_path) as fed:
        launcher = fed.supernodes(3, *SIZE)
        other = fed.supernodes(1, *SIZE, flower=("--node-config", "partition-id=3"))
        run = fed.run(num_clients=4, num_server_rounds=4, pause_folder=str(fed.pauses))

        # Round 1: a worker, then the fork servers. What runs does not need them.
        messages = all_held(fed, 1, 4)
        kill(messages[0].worker)
        until_leases(fed, 3)
        until_gone(messages[0], "its message")
        servers = fork_servers(fed)
        assert servers
        for pid in servers:
            kill(pid)
        until_gone(servers, "each fork server")
        assert all(is_running(pid) for client in (1, 2, 3) for pid in messages[client])
        fed.let_go(1)
        counted, [reason] = results_of(run, 1)
        assert counted == "3 results and 1 failures"
        assert "train of client 0: the worker" in reason and "was killed by SIGKILL (9)" in reason

        # Round 2: a command that waits for its worker, a SuperNode, a launcher.
        messages = all_held(fed, 2, 4)
        assert not set(fork_servers(fed)) & set(servers)
        kill(messages[1].command)
        until_gone(messages[1], "the message")
        until_leases(fed, 3)
        log = logs_of(fed, launcher) / "supernode-1.log"
        until(lambda: "flower-gpu: flwr-clientapp was killed by SIGKILL (9)" in log.read_text(), "it is said")

        killed = supernode_of(logs_of(fed, launcher), 2)
        kill(killed)
        until_gone([killed, *messages[2]], "the SuperNode with its message")
        until_leases(fed, 2)
        until(lambda: "SuperNode 2 ended with SIGKILL (-9); it is" in launcher.output, "that is said")

        logs = logs_of(fed, other)
        assert processes_with("FLOWER_GPU_RUN_DIR", logs)
        kill(other.pid)
        until(lambda: not processes_with("FLOWER_GPU_RUN_DIR", logs), "nothing is left of the launcher")
        until_gone(messages[3], "its message")
        until_leases(fed, 1)
        assert all(map(is_running, messages[0])), "what others have started goes on"
        single = fed.runs / "single"
        single.mkdir()
        again = fed.supernode(*SIZE, node_config="partition-id=3", env={"FLOWER_GPU_RUN_DIR": str(single)})

        fed.let_go(2)
        fed.let_go(3)
        counted, reasons = results_of(run, 2)
        assert counted == "1 results and 3 failures"
        assert sum("stopped responding" in reason for reason in reasons) == 1, reasons
        assert sum("Node Unavailable" in reason for reason in reasons) == 2, reasons
        assert results_of(run, 3) == ("4 results and 0 failures", [])

        # Round 4: SIGTERM for a SuperNode, Ctrl-C for a launcher with its SuperNodes.
        messages = all_held(fed, 4, 4)
        ends = (
            (again, signal.SIGTERM, single, (3,)),
            (launcher, signal.SIGINT, logs_of(fed, launcher), (0, 1, 2)),
        )
        for process, number, folder, clients in ends:
            assert processes_with("FLOWER_GPU_RUN_DIR", folder)
            process.send(number)
            assert process.wait(30) == 0
            until(lambda at=folder: not processes_with("FLOWER_GPU_RUN_DIR", at), "nothing is left")
            until_gone([pid for client in clients for pid in messages[client]], "each message")
            until_leases(fed, 3 if process is again else 0)
            others = (0, 1, 2) if process is again else ()
            assert all(is_running(pid) for client in others for pid in messages[client]), "others go on"
        assert fork_servers(fed), "it stays for the next ones"
        assert fed.start("stop", "flower-gpu", "workers", "stop", "--if-unused").wait(60) == 0
        until(lambda: not fork_servers(fed), "nobody has used it")
        assert all(path.startswith("state/") for path in fed.files())
        assert not fed.holders()
        assert len(events_of(logs_of(fed, launcher), "worker_started")) == 3 * 4
