"""`flower-gpu supernodes --keys`, with a SuperLink of Flower's own that asks for keys, and `flwr`."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import ssl
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from waiting import until

from flower_gpu.launch import ports
from flower_gpu.launch.authority import Authority
from flower_gpu.workers.forkserver.identity import script_folders

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


@dataclass(frozen=True)
class SuperLink:
    """A SuperLink with TLS that lets in registered nodes only."""

    port: int
    authority: Path
    env: Mapping[str, str]

    def flwr(self, line: str) -> str:
        """Run a command line of Flower's, as it was printed."""
        done = subprocess.run(
            shlex.split(line), env=self.env, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def nodes(self) -> list[dict[str, object]]:
        text = self.flwr("flwr supernode list here --format json")
        return json.loads(text[text.index("{") :])["nodes"]  # type: ignore[no-any-return]

    def start_nodes(self, folder: Path, said: Path) -> subprocess.Popen[bytes]:
        with said.open("wb") as output:
            return subprocess.Popen(
                [
                    *(sys.executable, "-P", "-m", "flower_gpu.cli", "supernodes", "--count", "2"),
                    *("--keys", "keys", "--", "--superlink", f"{ports.HOST}:{self.port}"),
                    *("--root-certificates", str(self.authority)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=folder,
                env=self.env,
            )


@pytest.fixture
def superlink(tmp_path: Path) -> Iterator[SuperLink]:
    for made in ("state", "flwr"):
        (tmp_path / made).mkdir(mode=0o700)
    authority = Authority()
    ca, own = tmp_path / "ca.crt", tmp_path / "superlink.pem"
    ca.write_bytes(authority.certificate)
    own.write_bytes(authority.issue("superlink"))
    port = ports.free_ports(1)[0]
    config = f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "{ports.HOST}:{port}"\n'
    (tmp_path / "flwr" / "config.toml").write_text(f'{config}root-certificates = "{ca}"\n')
    env = {
        **{name: value for name, value in os.environ.items() if not name.startswith("FLOWER_GPU_")},
        "FLWR_HOME": str(tmp_path / "flwr"),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLOWER_GPU_STATE_DIR": str(tmp_path / "state"),
        "FLOWER_GPU_LEDGER_DIR": str(tmp_path / "state"),
        "FLOWER_GPU_SERVER_IDLE_S": "10",
        "PATH": os.pathsep.join([*script_folders(), os.environ["PATH"]]),
    }
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(ca)
    with (tmp_path / "superlink.log").open("wb") as log:
        process = subprocess.Popen(
            [
                *("flower-superlink", "--enable-supernode-auth", "--host", ports.HOST, "--port", str(port)),
                *("--ssl-ca-certfile", str(ca), "--ssl-certfile", str(own), "--ssl-keyfile", str(own)),
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=env,
        )
    try:
        until(lambda: ports.is_healthy(port, context=context), "the SuperLink answers", 60)
        yield SuperLink(port, ca, env)
    finally:
        process.terminate()
        process.wait(timeout=60)


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
        # Three times is how often other SuperNodes may end early.
        logs = [f"supernode-{number}" for number in range(2)]
        until(lambda: min(starts(tmp_path, log) for log in logs) > 3, "each has asked several times", 200)
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
        until(lambda: statuses(superlink) == ["online"] * 2, "both are let in", 120)

        # The SuperLink takes one that was killed for connected still; it comes back as the same node.
        before = {node["node-id"] for node in superlink.nodes()}
        killed = processes_of_node(process.pid, tmp_path / "keys" / "supernode-1")
        assert killed
        for each in killed:
            each.kill()
        until(lambda: said.read_text().count("SuperNode 1 is not let in") == 2, "it is turned away", 60)
        until(lambda: "offline" in statuses(superlink), "the SuperLink has noticed", 180)
        until(lambda: statuses(superlink) == ["online"] * 2, "it is let in", 120)
        assert {node["node-id"] for node in superlink.nodes()} == before

        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        process.wait()
    assert {path.name: path.read_bytes() for path in (tmp_path / "keys").iterdir()} == keys


def starts(folder: Path, log: str) -> int:
    return sum(path.read_text().count("$ flower-supernode") for path in folder.glob(f"runs/*/{log}.log"))


def statuses(superlink: SuperLink) -> list[object]:
    return sorted(str(node["status"]) for node in superlink.nodes())
