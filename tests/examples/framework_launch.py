"""Launches an example with a framework other than PyTorch, and looks what its processes have imported."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from launched import REPOSITORY, Launch, Launched

CLIENTS, ROUNDS = 2, 1

# At the end of a client's process, what it has imported; a worker that is its fork does not get so far.
AT_EXIT = """
import atexit, sys
libraries = {"jax", "keras", "tensorflow", "torch"}
atexit.register(lambda: print("client has", sorted(libraries & set(sys.modules)), flush=True))
"""


def launched(launch: Launch, example: str, folder: Path, *options: str) -> Launched:
    """Run a copy of an example whose clients tell what they have imported."""
    app = folder / example
    shutil.copytree(REPOSITORY / "examples" / example, app)
    (client_app,) = app.glob("*/client_app.py")
    client_app.write_text(client_app.read_text() + AT_EXIT)
    # With the fast start a client is a fork of the fork server, and has what that has. A server with data to
    # preload is nobody else's, and has to end before it counts as left behind.
    env = {"FLOWER_GPU_SERVER_IDLE_S": "20"}
    return launch(app, "--no-fast-start", "--rounds", str(ROUNDS), *options, timeout_s=540, env=env)


def check(done: Launched, train: str, initial: str, start_method: str) -> None:
    """It has learned, each call in a worker of its own, and no client has imported a framework."""
    assert done.code == 0, done.output + done.logs()
    assert done.result["rounds"][-1]["accuracy"] >= 0.90

    found = re.findall(r"client has (\[.*\])", done.logs())
    assert found == ["[]"] * CLIENTS * ROUNDS

    workers = done.events("worker_started")
    assert sorted((event["client"], event["task"]) for event in workers) == sorted(
        [(str(client), train) for client in range(CLIENTS)] * ROUNDS
        + [("server", "evaluate")] * (ROUNDS + 1)
        + [("server", initial)]
    )
    assert len({event["pid"] for event in workers}) == len(workers)
    assert {event["start_method"] for event in workers if event["task"] == train} == {start_method}
