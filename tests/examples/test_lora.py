"""examples/lora: only adapters travel, and they are all that is trained."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from launched import REPOSITORY

APP = REPOSITORY / "examples" / "lora"
CONFIG = {"base-model": "", "rank": 4, "seed": 42}

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("peft", "transformers")),
    reason="needs peft and transformers",
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two rounds; the server's adapters are in ``adapter`` beside it."""
    folder = tmp_path_factory.mktemp("lora")
    config = f'local-epochs=1 save-adapter-to="{folder / "adapter"}"'
    command = [
        sys.executable,
        "-m",
        "flower_gpu.cli",
        "simulate",
        str(APP),
        "--clients",
        "2",
        "--rounds",
        "2",
    ]
    done = subprocess.run(
        [*command, "--seed", "1", "--run-config", config, "--log-dir", str(folder / "runs")],
        env={**os.environ, "HOME": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout
    (run,) = (folder / "runs").iterdir()
    return run


@pytest.mark.e2e
@pytest.mark.timeout(420)
def test_only_adapters_travel_and_only_they_change(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from safetensors.torch import load_file

    monkeypatch.syspath_prepend(APP)
    from lora import task

    summary = json.loads((finished / "result.json").read_text())
    assert summary["failed"] == 0 and summary["messages"] == 4
    trained, new = load_file(finished / "model.safetensors"), task.with_adapters(CONFIG)
    assert trained.keys() == task.adapters(new).keys()
    assert all("lora_" in name or ".classifier." in name for name in trained)
    assert sum(one.numel() for one in trained.values()) < 0.1 * sum(one.numel() for one in new.parameters())
    before = task.adapters(new)
    assert not any(torch.equal(trained[name], before[name]) for name in before if "lora_B" in name)
    assert trained.keys() == load_file(finished.parents[1] / "adapter" / "adapter_model.safetensors").keys()
