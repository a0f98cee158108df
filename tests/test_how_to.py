"""The first command of each page below docs/how-to runs: here, or in the test that is named."""

from __future__ import annotations

import re
import subprocess
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from how_to_pages import PAGES, commands
from launched import StubHost
from test_recipes import APP, PYPROJECT, environment

from flower_gpu.apps.app import parse_pairs
from flower_gpu.calls.settings import GPUSettings

REPOSITORY = PAGES.parents[1]
#: They install something first, which is not done here.
INSTALL = {"cluster.md", "lora.md", "ray.md", "tensorflow-and-jax.md", "trackers.md"}
#: Where the first command runs; these tests take it from the page.
ELSEWHERE = {
    "confine.md": "tests/flower/supernode/test_supernode_pages.py",
    "from-start-client.md": "tests/test_first_pages.py",
    "keys.md": "tests/launch/keyed_superlink.py",
    "lab-server.md": "tests/test_recipes.py",
    "simulate.md": "tests/test_simulate_docs.py",
    "supernodes.md": "tests/flower/supernode/test_supernode_pages.py",
    "sweeps.md": "tests/test_recipes.py",
}
#: Flower's own command, with options of ours: they are read here.
READ = {"existing-app.md"}
HERE = {"debug.md", "from-ray.md", "share-gpus.md", "slurm.md", "trackers.md", "watch.md"}

# Instead of what a page has: fewer clients, the run that is there, and commands that end by themselves.
SMALL = (
    (r"--clients \d+", "--clients 2"),
    (r"runs/<time>", "$(ls -d runs/* | head -1)"),
    (r"flower-gpu top", "flower-gpu top --once"),
    (r"(flower-gpu slurm .*) -- ", r"\1 --dry-run -- "),
    (r"flower-gpu doctor", "flower-gpu doctor || [ $? = 1 ]"),  # of problems of this host
)

TASK = """
def train(weights, config, partition_id):
    return [weight + config["server-round"] for weight in weights], 1, {}
"""


def test_the_first_command_of_every_page_is_run_by_a_test() -> None:
    with_commands = {page.name for page in PAGES.glob("*.md") if commands(page.name)}
    assert with_commands == INSTALL | ELSEWHERE.keys() | READ | HERE
    for page, test in ELSEWHERE.items():
        assert page in (REPOSITORY / test).read_text(), test


@pytest.mark.parametrize("page", sorted(INSTALL))
def test_what_a_page_installs_is_there(page: str) -> None:
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    install = commands(page)[0]
    assert install.startswith("pip install ")
    where, extra = re.findall(r"""["'](\S+)\[([\w-]+)\]["']""", install)[0]
    there = extras if where == "." else metadata.metadata(where).get_all("Provides-Extra") or []
    assert extra in there


def test_what_a_node_is_told_in_its_config_is_read() -> None:
    line = commands("existing-app.md")[0]
    (pairs,) = re.findall(r"^flower-supernode .*--node-config '(.+)'$", line)
    request = GPUSettings.resolve(node_config=parse_pairs("--node-config", [pairs]), environ={}).request
    assert request.memory_bytes == 4 << 30


@pytest.mark.e2e
@pytest.mark.timeout(400)
def test_first_commands_one_after_the_other(tmp_path: Path) -> None:
    """On a host with a stub GPU; what needs no GPU, cluster or account of others runs as it stands."""
    (tmp_path / "my-app").mkdir()
    (tmp_path / "my-app" / "pyproject.toml").write_text(PYPROJECT)
    (tmp_path / "my-app" / "my_app.py").write_text(APP)
    (tmp_path / "task.py").write_text(TASK)
    example = re.findall(r"```python\n(.*?)```", (PAGES / "debug.md").read_text(), re.DOTALL)[0]
    script = example.replace("\nclient", "\nweights = [np.zeros(2)]\nclient", 1) + "print('trained')\n"
    (tmp_path / "my_script.py").write_text(script)

    lines = [commands("from-ray.md")[1], commands("trackers.md")[1]]
    for page in sorted(HERE - {"from-ray.md", "trackers.md"}):
        lines += commands(page)
    lines.remove("flower-gpu metrics")  # goes on for ever; its tests look at it
    for pattern, replacement in SMALL:
        lines = [re.sub(pattern, replacement, line) for line in lines]
    done = subprocess.run(
        ["bash", "-exc", "\n".join(lines)],
        cwd=tmp_path,
        env=environment(StubHost(tmp_path / "host", gpus=1), tmp_path),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout
    for said in ("trained", "2 messages, 0 failed", "GPU 0", "#SBATCH --gpus-per-node=2", "tensorboard"):
        assert said in done.stdout, said
    assert list(tmp_path.glob("runs/*/tensorboard/*")) and list(tmp_path.glob("runs/*/report.html"))
