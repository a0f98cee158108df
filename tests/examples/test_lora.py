"""examples/lora trains and sends only adapters."""

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
def test_only_adapters_are_sent_and_trained(
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
    num_trained = sum(tensor.numel() for tensor in trained.values())
    assert num_trained < 0.1 * sum(parameter.numel() for parameter in new.parameters())
    before = task.adapters(new)
    assert not any(torch.equal(trained[name], before[name]) for name in before if "lora_B" in name)
    assert trained.keys() == load_file(saved / "adapter_model.safetensors").keys()
