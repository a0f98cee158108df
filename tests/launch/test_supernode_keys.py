"""`flower-gpu supernode --keys`, with a SuperLink of Flower's own that asks for keys, and `flwr`."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from keyed_superlink import SuperLink, keyed_superlink
from waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


@pytest.fixture
def superlink(tmp_path: Path) -> Iterator[SuperLink]:
    with keyed_superlink(tmp_path) as found:
        yield found


def processes_of_node(pid: int, private: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.Error):  # it has ended
            if f"--auth-supernode-private-key {private}" in " ".join(process.cmdline()):
                found.append(process)
    return found


def test_nodes_are_let_in_once_their_keys_are_registered_as_is_said(
    superlink: SuperLink, tmp_path: Path
) -> None:
    said = tmp_path / "said"
    process = superlink.start_nodes(tmp_path, said)
    try:
        # Other SuperNodes may not end early twice.
        logs = [f"supernode-{number}" for number in range(2)]
        until(lambda: min(starts(tmp_path, log) for log in logs) > 2, "each has asked several times", 200)
        assert superlink.nodes() == []
        keys = {path.name: path.read_bytes() for path in (tmp_path / "keys").iterdir()}
        assert sorted(keys) == ["supernode-0", "supernode-0.pub", "supernode-1", "supernode-1.pub"]
        text = said.read_text()
        commands = re.findall(r"^SuperNode \d: (flwr .*)\n  (ecdsa-sha2-nistp384 \S+)$", text, re.MULTILINE)
        assert len(commands) == 2
        for number, (command, public) in enumerate(commands):
            assert text.count(f"SuperNode {number} is not let in") == 1
            assert text.count(command) == 2  # also where it is turned away
            assert public.split() == keys[f"supernode-{number}.pub"].decode().split()
            superlink.flwr(command)
        told = [*(f"\nSuperNode {number} is let in\n" for number in range(2)), "2 of 2 SuperNodes\n"]
        until(lambda: [said.read_text().count(text) for text in told] == [1] * 3, "both are let in", 180)

        # The SuperLink takes one that was killed for connected still; it comes back as the same node.
        before = {node["node-id"] for node in superlink.nodes()}
        entered = entries(tmp_path, "supernode-1")
        killed = processes_of_node(process.pid, tmp_path / "keys" / "supernode-1")
        assert killed
        for each in killed:
            each.kill()
        until(lambda: said.read_text().count("SuperNode 1 is not let in") == 2, "it is turned away", 60)
        # Between the two it is offline, for less than a look at the SuperLink may take.
        until(lambda: entries(tmp_path, "supernode-1") > entered, "the SuperLink lets it in again", 240)
        until(lambda: said.read_text().count(told[1]) == 2, "which is said again", 60)
        assert {node["node-id"] for node in superlink.nodes()} == before

        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        process.wait()
    assert {path.name: path.read_bytes() for path in (tmp_path / "keys").iterdir()} == keys


def starts(folder: Path, log: str) -> int:
    return sum(path.read_text().count("$ flower-supernode") for path in folder.glob(f"runs/*/{log}.log"))


def entries(folder: Path, log: str) -> int:
    return sum(path.read_text().count("SuperNode ID:") for path in folder.glob(f"runs/*/{log}.log"))
