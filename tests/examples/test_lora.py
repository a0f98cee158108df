"""examples/lora: only adapters travel, and they are all that is trained."""

import importlib.util
from pathlib import Path

import pytest
import torch
from launched import REPOSITORY, SIMULATE, Launch

APP = REPOSITORY / "examples" / "lora"
CONFIG = {"base-model": "", "rank": 4, "seed": 42}

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("peft", "transformers")),
    reason="needs peft and transformers",
)


@pytest.mark.timeout(600)
def test_only_adapters_travel_and_only_they_change(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors.torch import load_file

    monkeypatch.syspath_prepend(APP)
    from lora import task

    saved = tmp_path / "adapter"
    config = f'local-epochs=1 save-adapter-to="{saved}"'
    options = ("--clients", "2", "--rounds", "2", "--seed", "1", "--run-config", config)
    done = launch(APP, *options, command=SIMULATE, timeout_s=500)
    assert done.code == 0, done.output
    assert done.result["failed"] == 0 and done.result["messages"] == 4
    trained, new = load_file(done.folder / "model.safetensors"), task.with_adapters(CONFIG)
    assert trained.keys() == task.adapters(new).keys()
    assert all("lora_" in name or ".classifier." in name for name in trained)
    assert sum(one.numel() for one in trained.values()) < 0.1 * sum(one.numel() for one in new.parameters())
    before = task.adapters(new)
    assert not any(torch.equal(trained[name], before[name]) for name in before if "lora_B" in name)
    assert trained.keys() == load_file(saved / "adapter_model.safetensors").keys()
