"""Tokens that a run receives reach the code that needs them, and none of the run's files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from mlflow_server import MLflowServer
from run_programs import run_cli, run_python
from scripted_app import write_app
from shared_servers import SHARED_STATE

pytestmark = pytest.mark.timeout(300)

VARIABLE, ARGUMENT, PASSWORD = "hf_v4riable", "s3_4rgument", "pw_0f_mlflow"

APP = """
import os

keys = []

def load(key):
    keys.append(key)

@client.train()
def train(message, context):
    assert len(os.environ["HF_TOKEN"]) == 11 and len(keys[0]) == 11
    if context.node_config["partition-id"] == 1:
        raise ValueError("one client fails")
    content = {"arrays": message.content["arrays"], "metrics": MetricRecord({"num-examples": 1})}
    return Message(RecordDict(content), reply_to=message)

@server.main()
def main(grid, context):
    rounds = context.run_config["num-server-rounds"]
    FedAvg().start(grid, ArrayRecord([np.zeros(1, "f4")]), num_rounds=rounds)
"""

SIMULATE = """
import json, sys
from flower_gpu import simulate
options = json.load(sys.stdin)  # W&B keeps the command line
simulate("app", 3, max_workers=1, progress=False, verbose=False, **options)
"""


def files_with(folder: Path, *secrets: str) -> list[str]:
    """Return the files of a folder that contain any of these texts."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert any(path.name == "result.json" for path in files)
    return [str(path) for path in files if any(secret.encode() in path.read_bytes() for secret in secrets)]


def test_no_file_of_a_run_has_its_secrets(tmp_path: Path) -> None:
    """This includes its output, and the resumed run, which reads the password of MLflow's server again."""
    write_app(tmp_path / "app", APP)
    options: dict[str, Any] = {
        "env": {"HF_TOKEN": VARIABLE},
        "preload": [["my_app.app:load", {"key": ARGUMENT}]],
        "clients": {"2": {"gpu": "never"}},
        "trackers": ["tensorboard", "wandb", "mlflow"],
        "log_dir": str(tmp_path / "runs"),
    }
    with MLflowServer() as server:
        env = {
            **os.environ,
            **SHARED_STATE,
            "PYTHONPATH": str(tmp_path / "app"),
            "WANDB_MODE": "offline",
            "WANDB_ERROR_REPORTING": "false",
            "MLFLOW_TRACKING_URI": f"http://me:{PASSWORD}@127.0.0.1:{server.port}",
            "MLFLOW_DISABLE_TELEMETRY": "true",
        }
        first = run_python(SIMULATE, input=json.dumps(options), cwd=tmp_path, env=env)
        [folder] = (tmp_path / "runs").iterdir()
        more = {**options, "resume": str(folder), "run_config": {"num-server-rounds": 2}, "trackers": None}
        second = run_python(SIMULATE, input=json.dumps(more), cwd=tmp_path, env=env)
    report = run_cli("report", folder, env=env)
    for done in (first, second, report):
        assert done.returncode == 0, done.stderr
        assert not any(each in done.stdout + done.stderr for each in (VARIABLE, ARGUMENT, PASSWORD))
    assert server.asked.count("create") == 1 and all(server.credentials)
    settings = json.loads((folder / "result.json").read_text())["settings"]
    assert settings["options"] == {"env": ["HF_TOKEN"], "preload": ["my_app.app:load(key)"]}
    assert "one client fails" in (folder / "failures.log").read_text()
    assert (folder / "report.html").is_file()
    assert files_with(folder, VARIABLE, ARGUMENT, PASSWORD) == []
