"""The services of a launch: their environment and ports, and how Flower's run status is read."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from flower_gpu.apps.folder import RunFolder
from flower_gpu.errors import ConfigError
from flower_gpu.launch import federation, ports
from flower_gpu.launch.federation import Federation, client_environment, run_status, service_environment
from flower_gpu.launch.options import LaunchOptions
from flower_gpu.launch.plan import make_plan
from flower_gpu.launch.supervisor import LaunchFailedError, Service, Supervisor
from flower_gpu.programs import commands
from flower_gpu.programs.commands import CommandFolder
from flower_gpu.workers.forkserver.identity import script_folders
from flower_gpu.workers.threads import cores


def test_the_environment_of_services_keeps_runs_apart(tmp_path: Path) -> None:
    base = {
        "PATH": "/usr/bin",
        "FLWR_HOME": "/home/me/.flwr",
        "FLOWER_GPU_CLIENT": "7",
        "FLOWER_GPU_RUN_DIR": "/old",
        "HTTP_PROXY": "http://proxy",
        "no_proxy": "example.org",
        "MINE": "kept",
    }
    env = service_environment(base, RunFolder(tmp_path), {"start_method": "fork", "timeout_s": 2.5})
    assert env["FLWR_HOME"] == str(tmp_path / "flwr")
    assert env["FLOWER_GPU_RUN_DIR"] == str(tmp_path)
    assert "FLOWER_GPU_CLIENT" not in env
    assert (env["FLOWER_GPU_START_METHOD"], env["FLOWER_GPU_TIMEOUT_S"]) == ("fork", "2.5")
    flowers = str(CommandFolder(commands.flowers()).path)
    assert env["PATH"].split(os.pathsep) == [flowers, *script_folders(), "/usr/bin"]
    assert env["FLWR_TELEMETRY_ENABLED"] == "0"
    assert env["FLWR_SUPEREXEC_TASK_POLL_INTERVAL"] == "0.1"
    assert env["FLWR_DISABLE_UPDATE_CHECK"] == "1"
    assert env["PYTORCH_NVML_BASED_CUDA_CHECK"] == "1"
    assert env["no_proxy"] == "example.org,127.0.0.1,localhost"
    assert env["NO_PROXY"] == "127.0.0.1,localhost"
    assert (env["MINE"], env["HTTP_PROXY"]) == ("kept", "http://proxy")
    # The server may use all cores, because its evaluation runs while the clients wait.
    assert not {"FLOWER_GPU_CONCURRENCY", "OMP_NUM_THREADS"} & set(env)
    user_variables = {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.05", "FLOWER_GPU_START_METHOD": "spawn"}
    assert user_variables.items() <= service_environment(user_variables, RunFolder(tmp_path)).items()


def test_a_client_gets_its_number_and_its_share_of_the_cores() -> None:
    assert client_environment({"A": "b"}, 3, 10**6) == {
        "A": "b",
        "FLOWER_GPU_CLIENT": "3",
        "FLOWER_GPU_CONCURRENCY": "1000000",
        "OMP_NUM_THREADS": "1",
    }
    assert client_environment({"OMP_NUM_THREADS": "5"}, 3, 10**6)["OMP_NUM_THREADS"] == "5"
    empty = client_environment({"FLOWER_GPU_CONCURRENCY": "", "OMP_NUM_THREADS": ""}, 3, 10**6)
    assert (empty["FLOWER_GPU_CONCURRENCY"], empty["OMP_NUM_THREADS"]) == ("1000000", "1")
    assert client_environment({}, 3, 1)["OMP_NUM_THREADS"] == str(cores())

    user_variables = client_environment({"FLOWER_GPU_CONCURRENCY": "1"}, 3, 10**6)
    assert (user_variables["FLOWER_GPU_CONCURRENCY"], user_variables["OMP_NUM_THREADS"]) == (
        "1",
        str(cores()),
    )
    with pytest.raises(ConfigError, match=r"FLOWER_GPU_CONCURRENCY must be a whole number.* 'all'"):
        client_environment({"FLOWER_GPU_CONCURRENCY": "all"}, 3, 4)


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ('{"runs": [{"status": "finished:completed", "status-details": "N/A"}]}', "completed"),
        ('note\n{"runs": [{"status": "finished:failed", "status-details": "why"}]}', "failed"),
        ('{"runs": [{"status": "running"}]}', "running"),
    ],
)
def test_the_status_of_the_run_is_read_from_flwr_list(text: str, status: str) -> None:
    assert run_status(text)[0].endswith(status)


@pytest.mark.parametrize("text", ["", "{", "{}", '{"runs": []}', '{"runs": [1]}', "[1]", "error"])
def test_an_output_without_a_status_is_an_error(text: str) -> None:
    with pytest.raises(LaunchFailedError, match="no status"):
        run_status(text)


# Binds the given port and answers health checks as Flower's servers do. If the port is taken, it exits with
# the same message as they do.
SERVER = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Healthy(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
try:
    server = HTTPServer(("127.0.0.1", int(sys.argv[1])), Healthy)
except OSError as error:
    sys.exit(f"[Errno {error.errno}] error while attempting to bind: address already in use")
server.serve_forever()
"""


def federation_with(link: Callable[[int], Sequence[str]], tmp_path: Path, app: Path) -> Federation:
    """Return a federation that starts the command `link(port)` in place of the SuperLink."""
    plan = make_plan(LaunchOptions(app, log_dir=tmp_path / "runs"))
    folder = RunFolder.create(tmp_path / "runs")
    watch = Supervisor(f"FLOWER_GPU_RUN_DIR={folder.path}")
    launching = Federation(plan, folder, os.environ, watch)

    def service(port: int) -> Service:
        return Service("SuperLink", link(port), os.environ, folder.log("superlink"))

    launching.link_service = service  # type: ignore[method-assign]
    return launching


def test_the_superlink_tries_another_port_if_the_first_was_taken_meanwhile(
    tmp_path: Path, tiny_app: Path
) -> None:
    ports_tried: list[int] = []
    with socket.create_server(("127.0.0.1", 0)) as other:

        def link(port: int) -> list[str]:
            ports_tried.append(port if ports_tried else other.getsockname()[1])
            return [sys.executable, "-c", SERVER, str(ports_tried[-1])]

        launching = federation_with(link, tmp_path, tiny_app)
        with launching._supervisor:
            launching._start_link()
            assert len(ports_tried) == 2
            assert launching._port == ports_tried[1] != ports_tried[0]
            assert ports.is_healthy(ports_tried[1])
    assert not ports.is_healthy(ports_tried[1])


@pytest.mark.parametrize(
    ("why", "attempts"), [("address already in use", federation.PORT_ATTEMPTS), ("something else", 1)]
)
def test_the_error_after_the_last_attempt_names_the_service(
    why: str, attempts: int, tmp_path: Path, tiny_app: Path
) -> None:
    ports_tried: list[int] = []

    def link(port: int) -> list[str]:
        ports_tried.append(port)
        return [sys.executable, "-c", f"import sys; sys.exit({why!r})"]

    launching = federation_with(link, tmp_path, tiny_app)
    with (
        launching._supervisor,
        pytest.raises(LaunchFailedError, match="SuperLink ended with exit code 1") as caught,
    ):
        launching._start_link()
    assert len(set(ports_tried)) == len(ports_tried) == attempts
    assert caught.value.service is not None
    assert "sys.exit" not in caught.value.service.tail().splitlines()[-1]


def test_the_bundled_app_leaves_out_logs_in_its_folder(tiny_app: Path) -> None:
    log_dir = tiny_app / "runs"
    old = log_dir / "old" / "flwr" / "apps" / "x.py"
    old.parent.mkdir(parents=True)
    old.write_text("")
    folder = RunFolder.create(log_dir)
    plan = make_plan(LaunchOptions(tiny_app, log_dir=log_dir))
    launching = Federation(plan, folder, os.environ, Supervisor(""))
    assert launching.app_folder() == folder.app
    copied = sorted(str(p.relative_to(folder.app)) for p in folder.app.rglob("*") if p.is_file())
    assert copied == [
        "pyproject.toml",
        "tiny/__init__.py",
        "tiny/client_app.py",
        "tiny/server_app.py",
    ]
