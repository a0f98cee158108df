"""The notebook in examples runs and shows the output that its text describes."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples/notebook/digits.ipynb"


def test_it_is_kept_without_outputs() -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)


@pytest.mark.timeout(600)
def test_it_runs(tmp_path: Path) -> None:
    # This import takes a while, which would also delay the mere collection of tests.
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    # The test needs only a few clients and rounds.
    for cell in notebook.cells:
        cell.source = cell.source.replace("NUM_CLIENTS = 10", "NUM_CLIENTS = 4")
        cell.source = cell.source.replace('"num-server-rounds": 5', '"num-server-rounds": 2')
    options = {"timeout": None, "kernel_name": "python3", "resources": {"metadata": {"path": str(tmp_path)}}}
    env = {**os.environ, "IPYTHONDIR": str(tmp_path / "ipython")}
    NotebookClient(notebook, **options).execute(env=env)

    ran, looked, best, report = [cell.outputs for cell in notebook.cells if cell.get("outputs")]
    # Progress and summary go to stdout, not stderr, and Flower's lines go to the log of the run.
    text = "".join(output.text for output in ran if output.get("name") == "stdout")
    assert re.search(r"^outcome +completed$", text, re.M) and "INFO" not in text
    has_lines = re.search(r"^round 2/2  train +4/4 clients", text, re.M)
    assert has_lines or "application/vnd.jupyter.widget-view+json" in str(ran)
    assert not [output.text for output in ran if output.get("name") == "stderr"]
    [log] = tmp_path.glob("runs/*/run.log")
    assert "[ROUND 2/2]" in log.read_text()

    shown = ran[-1].data
    assert "<table" in shown["text/html"] and "eval_accuracy" in shown["text/html"]
    assert shown["text/plain"].startswith("<SimulationResult app; 4 clients; 2 of 2 rounds; completed")
    assert "eval_accuracy" in looked[0].data["text/html"]
    [accuracy] = re.findall(r"best accuracy: ([\d.]+)", best[0].text)
    assert float(accuracy) > 0.85
    assert "<iframe" in report[0].data["text/html"]
