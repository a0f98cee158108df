"""Launches an example for a framework other than PyTorch, and checks what its processes have imported."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from launched import REPOSITORY, Launch, Launched

CLIENTS, ROUNDS = 2, 1

# Prints the frameworks that a client process has imported when it exits. Workers forked from it do not run
# exit handlers, so they print nothing.
AT_EXIT = """
import atexit, sys
libraries = {"jax", "keras", "tensorflow", "torch"}
atexit.register(lambda: print("client has", sorted(libraries & set(sys.modules)), flush=True))
"""


def launched(launch: Launch, example: str, folder: Path, *options: str) -> Launched:
    """Run a copy of an example in which clients print the frameworks that they have imported."""
    app = folder / example
    shutil.copytree(REPOSITORY / "examples" / example, app)
    (client_app,) = app.glob("*/client_app.py")
    client_app.write_text(client_app.read_text() + AT_EXIT)
    # With the fast start, a client is forked from the fork server and has the same imports, so it is
    # disabled. A fork server with preloaded data serves only this run, and must exit before the check for
    # processes that are left behind.
    env = {"FLOWER_GPU_SERVER_IDLE_S": "20"}
    return launch(app, "--no-fast-start", "--rounds", str(ROUNDS), *options, timeout_s=540, env=env)


def check(done: Launched, train: str, initial: str, start_method: str) -> None:
    """Check that the app has learned, each call had a separate worker, and no client imported a framework."""
    assert done.code == 0, done.output + done.logs()
    assert done.result["rounds"][-1]["accuracy"] >= 0.90

    imports = re.findall(r"client has (\[.*\])", done.logs())
    assert imports == ["[]"] * CLIENTS * ROUNDS

    workers = done.events("worker_started")
    assert sorted((event["client"], event["task"]) for event in workers) == sorted(
        [(str(client), train) for client in range(CLIENTS)] * ROUNDS
        + [("server", "evaluate")] * (ROUNDS + 1)
        + [("server", initial)]
    )
    assert len({event["pid"] for event in workers}) == len(workers)
    assert {event["start_method"] for event in workers if event["task"] == train} == {start_method}
