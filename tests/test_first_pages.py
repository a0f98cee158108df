"""Pages for newcomers, the tutorial and "Coming from start_client": their commands and programs run."""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from how_to_pages import PAGES, block, blocks
from shared_servers import SHARED_STATE

from flower_gpu.launch import ports

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

REPOSITORY = Path(__file__).parents[1]
TUTORIAL = REPOSITORY / "docs/tutorial/first-federation.md"
START_CLIENT = PAGES / "from-start-client.md"

# Instead of the numbers in the pages.
SMALL = ((r"--clients \d+", "--clients 2"), (r"--rounds \d+", "--rounds 2"))
TIMEOUT_S = 500  # also for the start of a fork server on a busy machine

#: Runs commands one after the other, each in a folder and a process, which is a fork: what they all import
#: takes a second.
COMMANDS = """
import json, os, sys
from flower_gpu.cli.main import main
import flower_gpu.simulation.run

for folder, words in json.loads(sys.argv[1]):
    child = os.fork()
    if not child:
        os.chdir(folder)
        sys.exit(main(words))
    assert os.waitpid(child, 0)[1] == 0, words
"""


def commands(page: Path, name: str) -> list[list[str]]:
    """Return the words of a page's commands of this program, with small numbers."""
    found = []
    for line in "".join(blocks(page, "bash")).splitlines():
        for pattern, replacement in SMALL:
            line = re.sub(pattern, replacement, line)
        if line.startswith(f"{name} "):
            found.append(shlex.split(line.partition("  #")[0].rstrip(" &"))[1:])
    return found


def write_app(here: Path, page: Path) -> Path:
    """Write the app of a page, whose module is the last example in Python."""
    app = here / "my-app"
    app.mkdir()
    (app / "pyproject.toml").write_text(blocks(page, "toml")[0])
    (app / "app.py").write_text(blocks(page, "python")[-1])
    return app


def start(here: Path, *words: str) -> subprocess.Popen[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("FLWR_", "CUDA_"))}
    return subprocess.Popen(
        [sys.executable, *words],
        cwd=here,
        env={**kept, **SHARED_STATE},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def end(*processes: subprocess.Popen[str]) -> list[str]:
    """Wait for these programs, the last one first, and return what they have written."""
    try:
        written = [process.communicate(timeout=TIMEOUT_S)[0] for process in reversed(processes)]
    finally:
        for process in processes:
            process.kill()
    written.reverse()
    for process, text in zip(processes, written, strict=True):
        assert process.returncode == 0, text
    return written


def test_the_commands_of_both_pages_one_after_the_other(tmp_path: Path) -> None:
    assert blocks(TUTORIAL, "bash")[0].strip() == "./run.sh"
    assert "\n./run.sh " in (REPOSITORY / ".ci" / "run").read_text(), "there it is run"
    tutorial, start_client = tmp_path / "tutorial", tmp_path / "start-client"
    for folder, page in ((tutorial, TUTORIAL), (start_client, START_CLIENT)):
        folder.mkdir()
        app = write_app(folder, page)
    (app / "task.py").write_text(block(START_CLIENT, "python", "# task.py"))
    (tutorial / "examples").symlink_to(REPOSITORY / "examples")
    words = commands(TUTORIAL, "flower-gpu")
    assert [each[:2] for each in words] == [
        ["simulate", "examples/quickstart"],
        ["simulate", "my-app"],
        ["top"],
    ]
    words[-1].append("--once")
    (of_start_client,) = commands(START_CLIENT, "flower-gpu")
    given = [*((str(tutorial), each) for each in words), (str(start_client), of_start_client)]
    (output,) = end(start(tmp_path, "-c", COMMANDS, json.dumps(given)))
    assert "No GPU" in output or "GPU 0" in output  # what top shows first
    for folder in (tutorial / "runs").iterdir():
        lines = (folder / "metrics.csv").read_text().splitlines()
        rows = [row for row in csv.DictReader(lines) if row["accuracy"]]
        assert int(rows[-1]["round"]) == 2
        assert float(rows[-1]["accuracy"]) > float(rows[0]["accuracy"]) + 0.2, rows
    (folder,) = (start_client / "runs").iterdir()
    summary = json.loads((folder / "result.json").read_text())
    assert (summary["outcome"], summary["failed"]) == ("completed", 0)


def test_start_client_scripts_before_and_after(tmp_path: Path) -> None:
    """The script as it was, with one line changed, and without processes of its own."""
    first, before, server, line, task, after, _ = blocks(START_CLIENT, "python")
    assert first == line, "the page begins with the line that it explains later"
    port = str(ports.free_ports(1)[0])
    assert before.count(line.partition("# was: ")[2]) == 1, "the line that is replaced"
    changed = before.replace(f"client = {line.partition('# was: ')[2]}", line.partition("  #")[0] + "\n")
    changed = changed.replace("import argparse\n", "import argparse\nfrom flower_gpu import gpu_client\n")
    served = server.replace("FedAvg(on", "FedAvg(min_available_clients=3, on").replace("rounds=3", "rounds=1")
    scripts = {"server": served, "before": before, "changed": changed, "after": after}
    (tmp_path / "task.py").write_text(task)
    for name, text in scripts.items():
        (tmp_path / f"{name}.py").write_text(text.replace("8080", port))
    words = commands(START_CLIENT, "python")
    assert words == [["server.py"], ["client.py", "--cid", "0"], ["client.py", "--cid", "1"]]
    clients = [
        [f"{name}.py", "--cid", str(cid)] for name, cid in (("before", 0), ("changed", 1), ("after", 0))
    ]
    output, *of_clients = end(*(start(tmp_path, *each) for each in (words[0], *clients)))
    assert "accuracy" in output and "received 3 results and 0 failures" in output
    assert "Run finished 1 round(s)" in output
    assert ["Disconnect and shut down" in each for each in of_clients] == [True] * 3
