"""A launch that starts slowly says what it is waiting for, and names the log to read."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from installed_again import installed_again
from launch_helpers import LaunchRun

from flower_gpu.apps.folder import RunFolder
from flower_gpu.flower import distribution
from flower_gpu.launch.federation import Federation
from flower_gpu.launch.options import LaunchOptions
from flower_gpu.launch.plan import make_plan
from flower_gpu.launch.supervisor import Service, Supervisor

pytestmark = pytest.mark.timeout(240)

# Prepended to the ServerApp's module, so the run waits until the file exists.
WAIT = """
import pathlib, time
while not pathlib.Path({path!r}).exists():
    time.sleep(0.05)
"""


@pytest.mark.e2e
def test_a_slow_server_app_is_named_with_two_distributions_of_flower_installed(
    launch: Callable[..., LaunchRun], tiny_app: Path, tmp_path: Path
) -> None:
    """Each command of Flower exists twice, and the run completes nevertheless."""
    path, continue_file = tiny_app / "tiny" / "server_app.py", tmp_path / "goes-on"
    path.write_text(WAIT.format(path=str(continue_file)) + path.read_text())
    (other,) = {*distribution.NAMES} - {*distribution.installed()}
    env = {"PYTHONPATH": str(installed_again(tmp_path, other))}
    started = launch(tiny_app, "--clients=2", "--rounds=1", "--start-method=in-process", env=env)
    assert started.process.stdout is not None
    # On a busy machine other lines come first, for example about the SuperLink.
    wait = "waiting for the ServerApp to send its first message. The end of "
    line = next((line for line in started.process.stdout if line.startswith(wait)), None)
    continue_file.touch()
    assert line is not None and re.search(r"run\.log: \S", line), "the last line of the log"
    code, out, err = started.finish()
    assert code == 0, out + err


def test_each_missing_part_is_named_with_its_log(tiny_app: Path, tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "runs")
    federation = Federation(
        make_plan(LaunchOptions(tiny_app, clients=7)), folder, {}, Supervisor("A=b"), lambda _: None
    )
    federation.server_log.touch()
    assert "waiting for the SuperLink to answer on port 0. The end of " in federation.missing()
    assert federation.missing().endswith("superlink.log: nothing yet")

    nodes = [Service(f"node {client}", ["true"], {}, folder.log(f"client-{client}")) for client in range(7)]
    federation._nodes = nodes
    federation.server_log.write_text("$ flwr run\nBuilding the app\n")
    assert re.fullmatch(r"waiting for flwr run to submit .*run\.log: Building the app", federation.missing())

    federation.server_log.write_text("$ flwr run\nSuccessfully started run 1\n")
    first = "$ flower-supernode\nINFO: SuperNode ID: 5\n"
    for node in nodes[1:]:
        node.log.write_text(first)
    # The SuperNode of client 0 was restarted.
    nodes[0].log.write_text(f"{first}$ {shlex.join(['flower-supernode'])}\nAttempt failed\n")
    text = federation.missing()
    assert "to admit the SuperNodes of client 0. The end of" in text and text.endswith(": Attempt failed")
    for node in nodes:
        node.log.unlink(missing_ok=True)
    assert "SuperNodes of clients 0, 1, 2, 3, 4 and 2 more. The end of" in federation.missing()
    for node in nodes:
        node.log.write_text(first)
    assert "waiting for the first client to begin" in federation.missing("the first client to begin")
