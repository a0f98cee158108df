"""examples/existing-app learns the same weights with and without its one-line change."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
import torch
from launched import REPOSITORY, events_of
from run_programs import run_python

APP = REPOSITORY / "examples" / "existing-app"

sys.path.insert(0, str(APP))


def changes() -> tuple[list[str], list[str]]:
    """Return the lines that the README's diff removes, and the lines that it adds."""
    _, _, diff = (APP / "README.md").read_text().partition("```diff\n")
    lines = diff.partition("```")[0].splitlines(keepends=True)
    return [line[1:] for line in lines if line[0] == "-"], [line[1:] for line in lines if line[0] == "+"]


def copy_without_the_change(folder: Path) -> Path:
    """Copy the app and undo the change that the README shows."""
    app = folder / "existing-app"
    shutil.copytree(APP, app, ignore=shutil.ignore_patterns("__pycache__"))
    (before,), (added, after) = changes()
    client_app = app / "existing_app" / "client_app.py"
    text = client_app.read_text()
    assert text.count(added) == 1 and text.count(after) == 1
    client_app.write_text(text.replace(added, "").replace(after, before))
    assert not any("flower_gpu import" in path.read_text() for path in app.rglob("*.py"))
    return app


#: Runs the server and the clients of each app one after the other, in a fork. PyTorch is imported only once.
RUN_APPS = """
import os, sys, tomllib
from pathlib import Path
import torch
from flwr.app import Context, RecordDict
from flwr.supercore.task_identity import TaskIdentity

TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1

def run(app, folder):
    os.chdir(app)
    sys.path.insert(0, app)
    os.environ["FLOWER_GPU_RUN_DIR"] = folder
    from existing_app import client_app, server_app
    config = tomllib.loads(Path("pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    config |= {"num-server-rounds": 1, "save-model-to": f"{folder}/model.pt"}

    def context(node):
        return Context(1, node, {"partition-id": node, "num-partitions": 2}, RecordDict(), config)

    class Grid:
        contexts = [context(0), context(1)]

        def get_node_ids(self):
            return [0, 1]

        def send_and_receive(self, messages, timeout=None):
            return [
                client_app.app(message, self.contexts[message.metadata.dst_node_id]) for message in messages
            ]

    server_app.main(Grid(), context(0))

for app, folder in zip(sys.argv[1::2], sys.argv[2::2]):
    if os.fork() == 0:
        run(app, folder)
        os._exit(0)
    assert os.wait()[1] == 0, app
"""


@pytest.mark.timeout(1200)
def test_the_one_line_change_changes_no_weights(tmp_path: Path) -> None:
    # This import takes seconds, which would also delay the mere collection of tests.
    from existing_app import task

    folders = {name: tmp_path / name for name in ("with", "without")}
    for folder in folders.values():
        folder.mkdir()
    without = copy_without_the_change(tmp_path)
    done = run_python(RUN_APPS, APP, folders["with"], without, folders["without"], timeout_s=1100)
    assert done.returncode == 0, done.stderr

    events = {name: events_of(folder, "worker_started") for name, folder in folders.items()}
    assert [event["task"] for event in events["with"]] == ["train"] * 2 + ["evaluate"] * 2
    assert events["without"] == []
    state = {name: torch.load(folder / "model.pt") for name, folder in folders.items()}
    assert state["with"].keys() == state["without"].keys() == task.Net().state_dict().keys()
    for key, tensor in state["with"].items():
        assert torch.allclose(tensor, state["without"][key], rtol=0, atol=1e-6), key

    net = task.Net()
    net.load_state_dict(state["with"])
    _, accuracy = task.test(net, task.load_held_out())
    assert accuracy > 0.5, "chance is 0.1"
