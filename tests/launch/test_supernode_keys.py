"""SuperNodes with keys as docs/how-to/supernodes.md says, and a SuperLink of Flower that asks for keys."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from how_to_pages import first_command
from keyed_superlink import SuperLink, keyed_superlink
from waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


@pytest.fixture
def superlink(tmp_path: Path) -> Iterator[SuperLink]:
    with keyed_superlink(tmp_path) as link:
        yield link


def processes_of_node(pid: int, private: Path) -> list[psutil.Process]:
    processes = []
    for process in psutil.Process(pid).children(recursive=True):
        # The process may have exited.
        with suppress(psutil.Error):
            if f"--auth-supernode-private-key {private} " in " ".join(process.cmdline()):
                processes.append(process)
    return processes


def test_a_node_connects_once_its_key_is_registered(superlink: SuperLink, tmp_path: Path) -> None:
    output = tmp_path / "said"
    process = superlink.start_node(tmp_path, output)
    try:
        # More than two starts show that refused keys do not count as early exits, which are limited to one.
        until(lambda: starts(tmp_path) > 2, "the node has retried several times", 200)
        keys = {path.name: path.read_bytes() for path in (tmp_path / "keys").iterdir()}
        assert sorted(keys) == ["supernode-0", "supernode-0.pub"]
        text = output.read_text()
        assert (
            text.count("SuperNode 0 is not admitted") == text.count("flwr supernode register FILE.pub") == 1
        )
        superlink.flwr(first_command("supernodes.md", "flwr supernode register"), tmp_path)
        is_in = "\nSuperNode 0 is admitted\n"
        for words in (is_in, "1 of 1 SuperNodes\n"):
            until(lambda words=words: output.read_text().count(words) == 1, "the node is admitted", 180)

        # The SuperLink still considers a killed node connected. The node comes back with the same id.
        ids_before = [node["node-id"] for node in superlink.nodes()]
        connections_before = connections(tmp_path)
        killed = processes_of_node(process.pid, Path("keys") / "supernode-0")
        assert killed
        for node_process in killed:
            node_process.kill()
        until(
            lambda: output.read_text().count("SuperNode 0 is not admitted") == 2,
            "the node is turned away",
            180,
        )
        # The node is offline for less time than a query of the SuperLink may take, so the log is read.
        until(lambda: connections(tmp_path) > connections_before, "the SuperLink lets the node in again", 240)
        until(lambda: output.read_text().count(is_in) == 2, "the connection is reported again", 180)
        assert [node["node-id"] for node in superlink.nodes()] == ids_before

        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        process.wait()
    assert {path.name: path.read_bytes() for path in (tmp_path / "keys").iterdir()} == keys


def starts(folder: Path) -> int:
    return log_of(folder).count("$ flower-supernode")


def connections(folder: Path) -> int:
    return log_of(folder).count("SuperNode ID:")


def log_of(folder: Path) -> str:
    return "".join(path.read_text() for path in folder.glob("runs/*/supernode-0.log"))
