"""The commands and programs of the tutorial and of "Coming from start_client" run."""

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

# Replaces the numbers in the pages by smaller numbers.
SMALL = ((r"--clients \d+", "--clients 2"), (r"--rounds \d+", "--rounds 2"))
#: Limit in seconds, including the start of a fork server on a busy machine.
TIMEOUT_S = 500

#: Runs commands one after the other, each in its folder and in a fork, because their imports take a second.
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
    """Return the arguments of a page's commands that run the program `name`, with small numbers."""
    matching = []
    for line in "".join(blocks(page, "bash")).splitlines():
        for pattern, replacement in SMALL:
            line = re.sub(pattern, replacement, line)
        if line.startswith(f"{name} "):
            matching.append(shlex.split(line.partition("  #")[0].rstrip(" &"))[1:])
    return matching


def write_app(folder: Path, page: Path) -> Path:
    """Write the app of a page. Its module is the last Python example on the page."""
    app = folder / "my-app"
    app.mkdir()
    (app / "pyproject.toml").write_text(blocks(page, "toml")[0])
    (app / "app.py").write_text(blocks(page, "python")[-1])
    return app


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("FLWR_", "CUDA_"))}
    return subprocess.Popen(
        [sys.executable, *words],
        cwd=folder,
        env={**kept, **SHARED_STATE},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def end(*processes: subprocess.Popen[str]) -> list[str]:
    """Wait for these programs, starting with the last, and return their output."""
    try:
        outputs = [process.communicate(timeout=TIMEOUT_S)[0] for process in reversed(processes)]
    finally:
        for process in processes:
            process.kill()
    outputs.reverse()
    for process, text in zip(processes, outputs, strict=True):
        assert process.returncode == 0, text
    return outputs


def test_the_commands_of_both_pages_run(tmp_path: Path) -> None:
    assert blocks(TUTORIAL, "bash")[0].strip() == "./run.sh"
    assert "\n./run.sh " in (REPOSITORY / ".ci" / "run").read_text(), "CI runs the first command"
    tutorial, start_client = tmp_path / "tutorial", tmp_path / "start-client"
    for folder, page in ((tutorial, TUTORIAL), (start_client, START_CLIENT)):
        folder.mkdir()
        app = write_app(folder, page)
    (app / "task.py").write_text(block(START_CLIENT, "python", "# task.py"))
    (tutorial / "examples").symlink_to(REPOSITORY / "examples")
    words = commands(TUTORIAL, "flower-gpu")
    assert [arguments[:2] for arguments in words] == [
        ["simulate", "examples/quickstart"],
        ["simulate", "my-app"],
        ["top"],
    ]
    words[-1].append("--once")
    (start_client_words,) = commands(START_CLIENT, "flower-gpu")
    runs = [*((str(tutorial), arguments) for arguments in words), (str(start_client), start_client_words)]
    (output,) = end(start(tmp_path, "-c", COMMANDS, json.dumps(runs)))
    # One of these is in the first line of `top`.
    assert "No GPU" in output or "GPU 0" in output
    for folder in (tutorial / "runs").iterdir():
        lines = (folder / "metrics.csv").read_text().splitlines()
        rows = [row for row in csv.DictReader(lines) if row["accuracy"]]
        assert int(rows[-1]["round"]) == 2
        assert float(rows[-1]["accuracy"]) > float(rows[0]["accuracy"]) + 0.2, rows
    (folder,) = (start_client / "runs").iterdir()
    summary = json.loads((folder / "result.json").read_text())
    assert (summary["outcome"], summary["failed"]) == ("completed", 0)


def test_start_client_scripts_work_before_and_after_the_change(tmp_path: Path) -> None:
    """The clients are the original script, the script with one changed line, and the final script."""
    first, before, server, line, task, after, _ = blocks(START_CLIENT, "python")
    assert first == line, "the page begins with the line that it explains later"
    port = str(ports.free_ports(1)[0])
    assert before.count(line.partition("# was: ")[2]) == 1, "the replaced line occurs once"
    changed = before.replace(f"client = {line.partition('# was: ')[2]}", line.partition("  #")[0] + "\n")
    changed = changed.replace("import argparse\n", "import argparse\nfrom flower_gpu import gpu_client\n")
    small_server = server.replace("FedAvg(on", "FedAvg(min_available_clients=3, on").replace(
        "rounds=3", "rounds=1"
    )
    scripts = {"server": small_server, "before": before, "changed": changed, "after": after}
    (tmp_path / "task.py").write_text(task)
    for name, text in scripts.items():
        (tmp_path / f"{name}.py").write_text(text.replace("8080", port))
    words = commands(START_CLIENT, "python")
    assert words == [["server.py"], ["client.py", "--cid", "0"], ["client.py", "--cid", "1"]]
    clients = [
        [f"{name}.py", "--cid", str(cid)] for name, cid in (("before", 0), ("changed", 1), ("after", 0))
    ]
    output, *client_outputs = end(*(start(tmp_path, *arguments) for arguments in (words[0], *clients)))
    assert "accuracy" in output and "received 3 results and 0 failures" in output
    assert "Run finished 1 round(s)" in output
    assert ["Disconnect and shut down" in text for text in client_outputs] == [True] * 3
