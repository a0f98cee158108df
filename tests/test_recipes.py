"""The commands of the recipes run, and do what their pages say."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from launched import StubHost, events_of

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

PAGES = Path(__file__).parents[1] / "docs" / "how-to"
RATES = ["0.01", "0.1", "1.0"]

PYPROJECT = """
[project]
name = "my-app"
version = "1"

[tool.flwr.app]
publisher = "nobody"

[tool.flwr.app.components]
serverapp = "my_app:server"
clientapp = "my_app:client"

[tool.flwr.app.config]
num-server-rounds = 1
learning-rate = 0.5
"""
APP = """
import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from flower_gpu import FedAvg

server, client = ServerApp(), ClientApp()


@server.main()
def main(grid, context):
    arrays = ArrayRecord({"w": Array(np.zeros(1, np.float32))})
    FedAvg().start(grid, arrays, num_rounds=1, evaluate_fn=evaluate)


def evaluate(server_round, arrays):
    return MetricRecord({"w": float(arrays["w"].numpy()[0])})


@client.train()
def train(message, context):
    w = message.content["arrays"]["w"].numpy() + np.float32(context.run_config["learning-rate"])
    content = {"arrays": ArrayRecord({"w": Array(w)}), "metrics": MetricRecord({"num-examples": 1})}
    return Message(RecordDict(content), reply_to=message)
"""


def block(page: str, language: str, number: int) -> str:
    """Return one of the blocks of code of a page."""
    blocks = re.findall(rf"```{language}\n(.*?)```", (PAGES / page).read_text(), re.DOTALL)
    found: str = blocks[number]
    return found


def environment(host: StubHost, folder: Path) -> dict[str, str]:
    state = folder / "state"
    state.mkdir(mode=0o700, exist_ok=True)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**os.environ, **host.env, "PATH": path, "FLOWER_GPU_STATE_DIR": str(state)}


def run(command: list[str], folder: Path, env: dict[str, str]) -> str:
    done = subprocess.run(
        command, cwd=folder, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=300
    )
    logs = "".join(path.read_text() for path in folder.glob("sweep/*.log"))
    assert done.returncode == 0, done.stdout + logs
    return done.stdout


@pytest.mark.parametrize(("number", "rates"), [(0, RATES[1:2]), (1, RATES)], ids=["loop", "xargs"])
def test_a_sweep_shares_the_gpu(number: int, rates: list[str], tmp_path: Path) -> None:
    (tmp_path / "my-app").mkdir()
    (tmp_path / "my-app" / "pyproject.toml").write_text(PYPROJECT)
    (tmp_path / "my-app" / "my_app.py").write_text(APP)
    command = block("sweeps.md", "bash", number)
    assert " ".join(RATES) in command and "--clients 20" in command
    small = command.replace(" ".join(RATES), " ".join(rates)).replace("--clients 20", "--clients 2")
    env = environment(StubHost(tmp_path / "host", gpus=1), tmp_path)
    run(["bash", "-ec", small], tmp_path, {**env, "FLOWER_GPU_NUM_GPUS": "0.25"})

    found = run([sys.executable, "-c", block("sweeps.md", "python", 0)], tmp_path, env)
    assert [line.split()[:2] for line in found.splitlines()] == [[rate, "completed"] for rate in rates]
    used = set()
    for rate, line in zip(rates, found.splitlines(), strict=True):
        assert float(re.search(r"'w': ([\d.e-]+)", line)[1]) == pytest.approx(float(rate))  # type: ignore[index]
        (folder,) = (path for path in (tmp_path / "sweep" / rate).iterdir() if path.is_dir())
        granted = events_of(folder, "lease_granted")
        assert granted
        used |= {gpu["uuid"] for event in granted for gpu in event["gpus"]}
    assert len(used) == 1, "all runs on the one GPU"


def test_the_ledger_of_a_lab_is_for_all_accounts(tmp_path: Path) -> None:
    command = block("lab-server.md", "bash", 1)
    assert command.count("/var/tmp/leases") == 2
    script = (
        command.replace("/var/tmp/leases", str(tmp_path / "leases")) + "flower-gpu doctor --json || true\n"
    )
    env = environment(StubHost(tmp_path / "host", gpus=1), tmp_path)
    findings = json.loads(run(["bash", "-ec", script], tmp_path, env))["findings"]
    (ledger,) = (one for one in findings if one["check"] == "ledger")
    assert (ledger["level"], ledger["text"]) == (
        "ok",
        f"{tmp_path / 'leases'}, for all accounts of this host",
    )
    quoted = re.search(r'"ok  ledger  /tmp, (.+)"', block("lab-server.md", "bash", 0))
    assert quoted and ledger["text"].endswith(quoted[1])
