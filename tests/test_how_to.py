"""The first command of each page below docs/how-to runs here or in a test named here, and so do recipes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from how_to_pages import PAGES, block, blocks, commands
from launched import events_of
from nvml_stub import Host
from scripted_app import write_app

from flower_gpu.apps.app import parse_pairs
from flower_gpu.calls.settings import call_settings

REPOSITORY = PAGES.parents[1]
#: Pages that first install something, which is not done here.
INSTALL = {"cluster.md", "lora.md", "tensorflow-and-jax.md", "trackers.md"}
#: Tests that run the first command of a page. They read it from the page.
ELSEWHERE = {
    "asynchronous.md": "tests/examples/test_fedbuff_example.py",
    "confine.md": "tests/programs/supernode/test_confined_apps.py",
    "federation.md": "tests/programs/supernode/test_federation_page.py",
    "from-start-client.md": "tests/test_first_pages.py",
    "resume.md": "tests/launch/test_launch_resumed.py",
    "simulate.md": "tests/test_simulate_docs.py",
    "slurm.md": "tests/test_slurm_page.py",
    "supernodes.md": "tests/programs/supernode/test_confined_apps.py",
}
#: Pages with a command of Flower. A test here only parses our options in it.
READ = {"existing-app.md"}
HERE = {"ray.md", "share-gpus.md", "training-code.md", "watch.md"}
#: Pages with commands that have separate tests at the end of this file.
RECIPES = {"sweeps.md"}
RATES = ["0.01", "0.1", "1.0"]

# Replacements in commands: fewer clients, the existing run, and options that make commands exit.
SMALL = (
    (r"--clients \d+", "--clients 2"),
    (r"runs/<time>", "$(ls -d runs/* | head -1)"),
    (r"flower-gpu top", "flower-gpu top --once"),
    # Status 1 means that doctor has found problems of this host.
    (r"flower-gpu doctor", "flower-gpu doctor || [ $? = 1 ]"),
)

APP = """
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
TASK = """
def train(weights, config, partition_id):
    return [weight + config["server-round"] for weight in weights], 1, {}
"""


def test_the_first_command_of_every_page_is_run_by_a_test() -> None:
    with_commands = {page.name for page in PAGES.glob("*.md") if commands(page.name)}
    assert with_commands == INSTALL | ELSEWHERE.keys() | READ | HERE | RECIPES
    for page, test in ELSEWHERE.items():
        assert page in (REPOSITORY / test).read_text(), test


def test_extras_that_pages_install_exist() -> None:
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    pages_with_pip = set()
    for page in PAGES.glob("*.md"):
        for line in re.findall(r"^pip install .+", page.read_text(), re.MULTILINE):
            pages_with_pip.add(page.name)
            package, extra = re.findall(r"""["'](\S+)\[([\w-]+)\]["']""", line)[0]
            if package in (".", "flwr"):
                metadata_extras = metadata.metadata("flwr").get_all("Provides-Extra") or []
                assert extra in (extras if package == "." else metadata_extras), line
    assert pages_with_pip == INSTALL | {"ray.md"}


def test_the_node_config_on_a_page_is_read() -> None:
    line = commands("existing-app.md")[0]
    (pairs,) = re.findall(r"^flower-supernode .*--node-config '(.+)'$", line)
    request = call_settings({}, base={}, node_config=parse_pairs("--node-config", [pairs])).gpu.request
    assert request.memory_bytes == 4 << 30


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a host with a stub GPU and this package's commands on PATH."""
    host = Host(tmp_path_factory.mktemp("how-to") / "host", gpus=1)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**os.environ, **host.env, "PATH": path}


def run(command: list[str], folder: Path, env: dict[str, str]) -> str:
    done = subprocess.run(
        command, cwd=folder, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=500
    )
    logs = "".join(path.read_text() for path in folder.glob("sweep/*.log"))
    assert done.returncode == 0, done.stdout + logs
    return done.stdout


@pytest.mark.e2e
@pytest.mark.timeout(600)
def test_the_first_commands_run_one_after_the_other(env: dict[str, str], tmp_path: Path) -> None:
    """They run on a host with a stub GPU, and need no cluster and no account."""
    write_app(tmp_path / "my-app", APP)
    (tmp_path / "task.py").write_text(TASK)
    script = block("training-code.md", "python", "client.fit(")
    script = script.replace("\nclient", "\nweights = [np.zeros(2)]\nclient", 1)
    (tmp_path / "my_script.py").write_text(f"{script}print('trained')\n")

    lines = [commands("ray.md")[0], commands("trackers.md")[1]]
    for page in sorted(HERE - {"ray.md"}):
        lines += commands(page)
    # This command runs until it is killed, and has tests of its own.
    lines.remove("flower-gpu metrics")
    for pattern, replacement in SMALL:
        lines = [re.sub(pattern, replacement, line) for line in lines]
    output = run(["bash", "-exc", "\n".join(lines)], tmp_path, env)
    for said in ("trained", "2 messages, 0 failed", "GPU 0", "tensorboard"):
        assert said in output, said
    assert list(tmp_path.glob("runs/*/tensorboard/*")) and list(tmp_path.glob("runs/*/report.html"))


@pytest.mark.e2e
@pytest.mark.timeout(600)
def test_a_sweep_shares_the_gpu(env: dict[str, str], tmp_path: Path) -> None:
    """The page has two ways to run the sweep. This test runs the one with xargs."""
    write_app(tmp_path / "my-app", APP)
    _, command, *_ = blocks("sweeps.md", "bash")
    rates = RATES[:2]
    assert " ".join(RATES) in command and "--clients 20" in command
    small = command.replace(" ".join(RATES), " ".join(rates)).replace("--clients 20", "--clients 2")
    run(["bash", "-ec", small], tmp_path, {**env, "FLOWER_GPU_NUM_GPUS": "0.25"})

    output = run([sys.executable, "-c", blocks("sweeps.md", "python")[0]], tmp_path, env)
    assert [line.split()[:2] for line in output.splitlines()] == [[rate, "completed"] for rate in rates]
    gpus = set()
    for rate, line in zip(rates, output.splitlines(), strict=True):
        assert float(re.search(r"'w': ([\d.e-]+)", line)[1]) == pytest.approx(float(rate))  # type: ignore[index]
        (folder,) = (path for path in (tmp_path / "sweep" / rate).iterdir() if path.is_dir())
        granted = events_of(folder, "lease_granted")
        assert granted
        gpus |= {gpu["uuid"] for event in granted for gpu in event["gpus"]}
    assert len(gpus) == 1, "all runs share the only GPU"


@pytest.mark.e2e
@pytest.mark.timeout(600)
def test_the_ledger_of_a_lab_is_for_all_accounts(env: dict[str, str], tmp_path: Path) -> None:
    command = block("share-gpus.md", "bash", "export FLOWER_GPU_LEDGER_DIR")
    assert command.count("/var/tmp/leases") == 2
    script = command.replace("/var/tmp/leases", str(tmp_path / "leases"))
    script += "flower-gpu doctor --json || true\n"
    findings = json.loads(run(["bash", "-ec", script], tmp_path, env))["findings"]
    (ledger,) = (finding for finding in findings if finding["check"] == "ledger")
    expected = f"{tmp_path / 'leases'}, for all accounts of this host"
    assert (ledger["level"], ledger["text"]) == ("ok", expected)
    quoted = re.search(r'"ok  ledger  /tmp, (.+)"', block("share-gpus.md", "bash", "ok  ledger"))
    assert quoted and ledger["text"].endswith(quoted[1])
