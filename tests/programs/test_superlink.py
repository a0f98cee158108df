"""The address of a SuperNode's SuperLink, and the messages if no program listens there."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from flwr.supercore import constant
from flwr.superlink.cli.flower_superlink import _parse_args_run_superlink
from run_programs import run_python
from shared_servers import SHARED_STATE

from flower_gpu.programs import superlink

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def listener(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        yield server


def address_of(server: socket.socket) -> str:
    return "{}:{}".format(*server.getsockname())


@pytest.mark.parametrize(
    ("options", "address", "is_local"),
    [
        ([], constant.SUPERLINK_DEFAULT_CLIENT_ADDRESS, True),
        (["--insecure", "--superlink", "127.0.0.1:8001"], "127.0.0.1:8001", True),
        (["--superlink=localhost:8000", "--node-config", "a=1"], "localhost:8000", True),
        (["--superl", "[::1]:8000", "--ssl-certfile", "x"], "[::1]:8000", True),
        (["--superlink", "10.0.0.7:8000"], "10.0.0.7:8000", False),
        (["--superlink", "superlink.example.org:8000"], "superlink.example.org:8000", False),
    ],
)
def test_the_address_is_read_from_flowers_option(options: list[str], address: str, is_local: bool) -> None:
    assert superlink.address_of(options) == address
    assert superlink.is_on_this_host(address) is is_local


def test_the_docs_name_the_default_port_of_a_superlink() -> None:
    """All pages and the help show the default of Flower's command."""
    port = _parse_args_run_superlink().get_default("port")
    pages = [*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").rglob("*.md")]
    files = [*pages, REPOSITORY / "flower_gpu" / "cli" / "supernode.py"]
    ports = [
        port_text for file in files for port_text in re.findall(r"--superlink \S+?:(\d+)", file.read_text())
    ]
    assert len(ports) > 15 and {*ports} == {str(port)}
    assert superlink.address_of([]).endswith(f":{port}")


def test_the_message_for_a_missing_superlink_names_the_default_port(listener: socket.socket) -> None:
    lines: list[str] = []
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        time.sleep(seconds)

    address = address_of(listener)  # bound, but not listening
    superlink.wait_until_it_listens(address, lines.append, sleep)
    (line,) = lines
    assert line.startswith(f"no program listens at {address}. The SuperNode keeps trying. A SuperLink of ")
    assert line.endswith("listens on port 8000 by default") and len(pauses) > 2


def test_a_superlink_that_starts_a_moment_later_causes_no_message(listener: socket.socket) -> None:
    lines: list[str] = []
    superlink.wait_until_it_listens(address_of(listener), lines.append, lambda _: listener.listen())
    assert not lines


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("no-such-host.invalid:8000", "no-such-host.invalid:8000 cannot be reached ("),
        # Flower itself refuses the next two addresses.
        ("127.0.0.1", None),
        ("127.0.0.1:80000", None),
    ],
)
def test_other_reasons_for_a_failed_connection_are_reported(
    listener: socket.socket, address: str, reason: str | None
) -> None:
    text = superlink.unreachable_because(address)
    assert text is None if reason is None else text is not None and text.startswith(reason)


def test_with_a_proxy_only_direct_connections_are_checked(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert superlink.unreachable_because("no-such-host.invalid:8000") is None
    assert superlink.unreachable_because(address_of(listener)) is not None


def test_the_command_names_the_address_before_it_starts_flowers_command(listener: socket.socket) -> None:
    address = address_of(listener)
    code = """
import os, sys
os.execvpe = lambda *_: sys.exit("became it")
from flower_gpu.cli.main import main
main(sys.argv[1:])
"""
    words = ["supernode", "--", "--insecure", "--superlink", address]
    completed = run_python(code, *words)
    lines = completed.stdout.splitlines()
    assert lines[-2] == f"connecting to the SuperLink at {address}" and "became it" in completed.stderr
    assert lines[-1].startswith(f"no program listens at {address}. ")


@pytest.mark.e2e
@pytest.mark.timeout(180)
def test_a_command_for_several_supernodes_reports_a_missing_superlink_too(
    listener: socket.socket, tmp_path: Path
) -> None:
    address = address_of(listener)
    command_options = ("supernode", "--count", "1", "--log-dir", str(tmp_path / "runs"))
    command = [
        sys.executable,
        "-m",
        "flower_gpu.cli",
        *command_options,
        "--",
        "--insecure",
        "--superlink",
        address,
    ]
    env = {**os.environ, **SHARED_STATE}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as nodes:
        try:
            assert nodes.stdout is not None
            for line in nodes.stdout:
                if line.startswith("no program"):
                    break
        finally:
            nodes.send_signal(signal.SIGINT)
    assert line.startswith(f"no program listens at {address}. The SuperNode keeps trying. ")
