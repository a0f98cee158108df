"""The one-line change of examples/existing-app: the same app with it and without it."""

import shutil
import sys
from pathlib import Path

import pytest
import torch
from launched import REPOSITORY, Launch

from flower_gpu import trace

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


@pytest.mark.e2e
@pytest.mark.timeout(600)
def test_the_one_line_change_changes_no_weights(launch: Launch, tmp_path: Path) -> None:
    state = {}
    for name, app, fraction in (
        ("with", APP, 1.0),
        ("without", copy_without_the_change(tmp_path), 0.0),  # evaluation changes no weights
    ):
        file = tmp_path / f"{name}.pt"
        config = f'save-model-to="{file}" fraction-evaluate={fraction}'
        done = launch(app, "--rounds", "2", "--run-config", config)
        assert done.code == 0, done.output + done.logs()
        started = [event for event in trace.read(done.folder / "trace.jsonl") if "pid" in event]
        tasks = sorted(event["task"] for event in started if event["event"] == "worker_started")
        assert tasks == (["evaluate"] * 4 + ["train"] * 4 if name == "with" else [])
        state[name] = torch.load(file)
        done.folder.rename(tmp_path / f"run-{name}")  # the fixture wants to find one only

    assert state["with"].keys() == state["without"].keys() == task.Net().state_dict().keys()
    for key, tensor in state["with"].items():
        assert torch.allclose(tensor, state["without"][key], rtol=0, atol=1e-6), key

    net = task.Net()
    net.load_state_dict(state["with"])
    _, accuracy = task.test(net, task.load_held_out())
    assert accuracy > 0.9, "chance is 0.1"
