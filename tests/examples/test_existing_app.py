"""The one-line change of examples/existing-app: the same app with it, and without it in one process."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from launched import REPOSITORY, Launch

APP = REPOSITORY / "examples" / "existing-app"

sys.path.insert(0, str(APP))
from existing_app import task  # noqa: E402


def changes() -> tuple[list[str], list[str]]:
    """Return the lines that the README's diff takes away, and those that it adds."""
    _, _, diff = (APP / "README.md").read_text().partition("```diff\n")
    lines = diff.partition("```")[0].splitlines(keepends=True)
    return [line[1:] for line in lines if line[0] == "-"], [line[1:] for line in lines if line[0] == "+"]


def copy_without_the_change(folder: Path) -> Path:
    """Copy the app and undo what the README says was done."""
    app = folder / "without"
    shutil.copytree(APP, app, ignore=shutil.ignore_patterns("__pycache__"))
    (before,), (added, after) = changes()
    client_app = app / "existing_app" / "client_app.py"
    text = client_app.read_text()
    assert text.count(added) == 1 and text.count(after) == 1
    client_app.write_text(text.replace(added, "").replace(after, before))
    assert not any("flower_gpu import" in path.read_text() for path in app.rglob("*.py"))
    return app


#: Runs the app in one process: its server, and its clients one after the other.
HERE = """
import sys, tomllib
from pathlib import Path
from flwr.app import Context, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from existing_app import client_app, server_app

TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
config = tomllib.loads(Path("pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
config |= {"num-server-rounds": 1, "fraction-evaluate": 0.0, "save-model-to": sys.argv[1]}

def context(node):
    return Context(1, node, {"partition-id": node, "num-partitions": 2}, RecordDict(), config)

class Grid:
    contexts = [context(0), context(1)]

    def get_node_ids(self):
        return [0, 1]

    def send_and_receive(self, messages, timeout=None):
        return [client_app.app(one, self.contexts[one.metadata.dst_node_id]) for one in messages]

server_app.main(Grid(), context(0))
"""


@pytest.mark.e2e
@pytest.mark.timeout(600)
def test_the_one_line_change_changes_no_weights(launch: Launch, tmp_path: Path) -> None:
    files = {name: tmp_path / f"{name}.pt" for name in ("with", "without")}
    done = launch(APP, "--rounds", "1", "--run-config", f'save-model-to="{files["with"]}"')
    assert done.code == 0, done.output + done.logs()
    tasks = sorted(event["task"] for event in done.events("worker_started"))
    assert tasks == ["evaluate"] * 2 + ["train"] * 2
    app = copy_without_the_change(tmp_path)
    subprocess.run([sys.executable, "-c", HERE, files["without"]], cwd=app, check=True, timeout=200)
    state = {name: torch.load(file) for name, file in files.items()}

    assert state["with"].keys() == state["without"].keys() == task.Net().state_dict().keys()
    for key, tensor in state["with"].items():
        assert torch.allclose(tensor, state["without"][key], rtol=0, atol=1e-6), key

    net = task.Net()
    net.load_state_dict(state["with"])
    _, accuracy = task.test(net, task.load_held_out())
    assert accuracy > 0.5, "chance is 0.1"
