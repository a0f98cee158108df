"""If a SuperNode cannot start, the command says why, and exits if a restart would not help."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from run_programs import run_cli

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

COMMAND = (sys.executable, "-m", "flower_gpu.cli", "supernode", "--count=1")
NO_PORT = "127.0.0.1:99999"


@pytest.fixture
def without_tls() -> Iterator[str]:
    """The address of an HTTP server without TLS, which stands in for a SuperLink without certificates."""
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_permanent_fault_ends_the_command_with_its_reason(without_tls: str, tmp_path: Path) -> None:
    expected = {
        (
            "--insecure",
            "--superlink",
            NO_PORT,
        ): r"exit code 1: SuperLink address \(127.0.0.1:99999\) cannot be",
        ("--superlink", without_tls): r"exit code 1: .*WRONG_VERSION_NUMBER.* without TLS: add --insecure",
        ("--insecure", "--bogus"): "exit code 2: unrecognized arguments: --bogus",
    }
    started = {
        options: subprocess.Popen(
            [*COMMAND, "--log-dir", str(tmp_path / str(number)), "--", *options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number, options in enumerate(expected)
    }
    for options, process in started.items():
        out, err = process.communicate(timeout=240)
        assert process.returncode == 1
        assert "it is started again" not in out
        assert re.fullmatch(f"flower-gpu supernode: SuperNode 0 ended with {expected[options]}.*\n", err), err


def test_a_port_that_is_already_used_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        ended = run_cli("supernode", "--", "--insecure", "--superlink", NO_PORT, "--port", port)
    assert ended.returncode == 2
    assert ended.stderr.startswith(
        f"flower-gpu supernode: --port {port}: another process listens on this port"
    )
