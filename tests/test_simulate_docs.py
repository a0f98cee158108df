"""The commands and examples of the pages on simulations run, with the results that the pages describe."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import run_programs
from how_to_pages import PAGES, blocks
from scripted_app import write_app
from shared_servers import SHARED_STATE

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

REFERENCE = "".join(
    (PAGES.parent / "reference" / f"{page}.md").read_text() for page in ("simulate", "result")
)

# Replaces the numbers of clients, rounds and megabytes in the page by smaller numbers.
SMALL = ((r"\b1000\b", "3"), (r"num-server-rounds=\d+", "num-server-rounds=1"), (r"\d+MiB", "1MiB"))
A_RUN = "runs/2026-01-31_12-00-00"
#: Limit in seconds for all commands together on a busy machine.
RUN_TIMEOUT_S = 500

APP = """
@server.main()
def main(grid, context):
    arrays = ArrayRecord({"w": Array(np.zeros(3, np.float32))})
    FedAvg(exact_order=True).start(grid, arrays, num_rounds=context.run_config["num-server-rounds"])


@client.train()
def train(message, context):
    partition, of = context.node_config["partition-id"], context.node_config["num-partitions"]
    if partition == 1 and context.run_config["learning-rate"] > 1:
        raise ValueError("no data")
    context.state["last"] = MetricRecord({"partition": partition})
    w = message.content["arrays"]["w"].numpy()
    w = w + context.run_config["learning-rate"] * (partition / of + np.random.rand(3) - w)
    arrays = ArrayRecord({"w": Array(w.astype(np.float32))})
    metrics = MetricRecord({"num-examples": 1, "loss": float(np.sum(w**2))})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)
"""

TASK = """
def load_data(num_partitions):
    global data
    data = [[number] for number in range(num_partitions)]
"""

BEFORE_BATCHES = """
import torch
from torch import nn
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

app, server = ClientApp(), ServerApp()
Net = lambda: nn.Linear(3, 2)
load_data = lambda partition: (torch.ones(4 + partition % 2, 3), torch.zeros(4 + partition % 2).long())
"""
BATCHES = """
@server.main()
def main(grid, context):
    arrays = ArrayRecord(network.state_dict())
    flower_gpu.FedAvg().start(grid, arrays, num_rounds=2)

result = flower_gpu.simulate((server, app), 24, log_dir=None, progress=False, max_workers=1)
print(result.summary["failed"], result.summary["batches"]["count"] > 2, sorted(result.model))
"""

#: Runs commands one after the other in a single process, because the imports take a second.
COMMANDS = """
import json, os, sys
from pathlib import Path
from flower_gpu.cli.main import main

first = dict(os.environ)
for number, (variables, words) in enumerate(json.loads(sys.argv[1])):
    os.environ.clear()
    os.environ.update(first | variables)
    newest = max(Path("runs").iterdir(), key=os.path.getmtime, default=None) if number else None
    words = [str(newest) if word == "A_RUN" else word for word in words]
    assert main(words) == 0, words
    newest = max(Path("runs").iterdir(), key=os.path.getmtime)
    print(json.dumps([str(newest.absolute()), json.loads((newest / "result.json").read_text())]))
"""
#: The last command, a run in which a client fails.
FAILS = ["simulate", "my-app", "--num-supernodes", "4", "--calls-per-worker", "2"]
FAILS += ["--run-config", "learning-rate=2.0 num-server-rounds=1"]

Run = Callable[[list[str]], "subprocess.CompletedProcess[str]"]
#: The folder of a run, and its result.
Summary = tuple[str, dict[str, Any]]


def commands() -> list[str]:
    return [
        line.partition("  #")[0].strip()
        for block in blocks("simulate.md", "bash")
        for line in block.splitlines()
        if "flower-gpu" in line
    ]


def small(text: str) -> str:
    for pattern, replacement in SMALL:
        text = re.sub(pattern, replacement, text)
    return text


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an app and a file of config values."""
    here = tmp_path_factory.mktemp("simulate")
    (write_app(here / "my-app", APP) / "task.py").write_text(TASK)
    (here / "values.toml").write_text("learning-rate = 0.25\n")
    (devices,) = blocks("simulate.md", "toml")
    (here / "devices.toml").write_text(devices)
    return here


@pytest.fixture(scope="module")
def run(here: Path) -> Run:
    """Run a Python program in that folder until it exits."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("FLWR_", "CUDA_"))}
    env = {**kept, **SHARED_STATE}

    def run(words: list[str]) -> subprocess.CompletedProcess[str]:
        done = run_programs.run([sys.executable, *words], cwd=here, env=env, timeout_s=RUN_TIMEOUT_S)
        assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout}\n{done.stderr}"
        return done

    return run


@pytest.fixture(scope="module")
def summaries(run: Run) -> dict[str, Summary]:
    """Folder and result of each command of the page, and of the run in which a client fails."""
    invocations = []
    for command in commands():
        words = shlex.split(small(command).replace(A_RUN, "A_RUN"))
        start = words.index("flower-gpu")
        invocations.append((dict(word.split("=") for word in words[:start]), words[start + 1 :]))
    done = run(["-c", COMMANDS, json.dumps([*invocations, ({}, FAILS)])])
    assert "  client 1, train in round 1: ValueError: no data" in done.stderr
    return dict(zip([*commands(), "fails"], map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.parametrize("command", commands())
def test_each_command_of_the_page_runs(command: str, summaries: dict[str, Summary]) -> None:
    _, result = summaries[command]
    assert (result["outcome"], result["failed"]) == ("completed", 0)
    assert result["resumed_after_round"] == (1 if A_RUN in command else None)


def test_the_examples_in_python_run_one_after_the_other(here: Path, run: Run) -> None:
    examples = [small(example) for example in blocks("simulate.md", "python")]
    (script,) = (example for example in examples if "client_app)," in example)
    examples.remove(script)
    (here / "others.py").write_text("\n".join(examples))
    (here / "of_script.py").write_text(f"{script}\nimport others")
    output = run(["of_script.py"]).stdout
    assert "\n[2. 2. 2.]\n" in f"\n{output}", "two rounds, each of which adds the mean of 0, 1 and 2"
    assert "{'w': (3,)}" in output


def test_the_example_of_batches_runs(here: Path, run: Run) -> None:
    (example,) = blocks("small-clients.md", "python")
    (here / "batches.py").write_text(BEFORE_BATCHES + example + BATCHES)
    assert run(["batches.py"]).stdout.splitlines()[-1] == "0 True ['bias', 'weight']"


def test_the_reference_names_every_file_and_key_of_a_run(summaries: dict[str, Summary]) -> None:
    folder, result = summaries["fails"]
    first_column = " ".join(re.findall(r"^\| (.+?) \|", REFERENCE, re.MULTILINE))
    for path in Path(folder).iterdir():
        assert f"`{path.name}{'/' * path.is_dir()}`" in first_column, path.name
    for key in [*result, *result["settings"]]:
        assert f"`{key}`" in first_column, key
    for key in result["rounds"][0]:
        assert f"`{key}`" in REFERENCE, key
