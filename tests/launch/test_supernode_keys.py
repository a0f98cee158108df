"""SuperNodes with keys as docs/how-to/supernodes.md says, and Flower's own SuperLink that asks for keys."""

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
    with keyed_superlink(tmp_path) as found:
        yield found


def processes_of_node(pid: int, private: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.Error):  # it has ended
            if f"--auth-supernode-private-key {private} " in " ".join(process.cmdline()):
                found.append(process)
    return found


def test_a_node_is_let_in_once_its_key_is_registered(superlink: SuperLink, tmp_path: Path) -> None:
    said = tmp_path / "said"
    process = superlink.start_node(tmp_path, said)
    try:
        # Other SuperNodes may not end early twice.
        until(lambda: starts(tmp_path) > 2, "it has asked several times", 200)
        keys = {path.name: path.read_bytes() for path in (tmp_path / "keys").iterdir()}
        assert sorted(keys) == ["supernode-0", "supernode-0.pub"]
        text = said.read_text()
        assert text.count("SuperNode 0 is not let in") == text.count("flwr supernode register FILE.pub") == 1
        superlink.flwr(first_command("supernodes.md", "flwr supernode register"), tmp_path)
        is_in = "\nSuperNode 0 is let in\n"
        for words in (is_in, "1 of 1 SuperNodes\n"):
            until(lambda words=words: said.read_text().count(words) == 1, "it is let in", 180)

        # The SuperLink takes one that was killed for connected still; it comes back as the same node.
        before = [node["node-id"] for node in superlink.nodes()]
        entered = entries(tmp_path)
        killed = processes_of_node(process.pid, Path("keys") / "supernode-0")
        assert killed
        for each in killed:
            each.kill()
        until(lambda: said.read_text().count("SuperNode 0 is not let in") == 2, "it is turned away", 180)
        # Between the two it is offline, for less than a look at the SuperLink may take.
        until(lambda: entries(tmp_path) > entered, "the SuperLink lets it in again", 240)
        until(lambda: said.read_text().count(is_in) == 2, "which is said again", 180)
        assert [node["node-id"] for node in superlink.nodes()] == before

        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        process.wait()
    assert {path.name: path.read_bytes() for path in (tmp_path / "keys").iterdir()} == keys


def starts(folder: Path) -> int:
    return log_of(folder).count("$ flower-supernode")


def entries(folder: Path) -> int:
    return log_of(folder).count("SuperNode ID:")


def log_of(folder: Path) -> str:
    return "".join(path.read_text() for path in folder.glob("runs/*/supernode-0.log"))
