"""Saving a model as a safetensors file."""

from __future__ import annotations

import stat
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from properties import examples
from safetensors.torch import load_file
from torch import nn

from flower_gpu.errors import ConfigError, WeightsError
from flower_gpu.pytorch.weights import get_weights, save_model

pytestmark = pytest.mark.filterwarnings("error")

DTYPES = [
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool),
]
SHAPES = st.lists(st.integers(0, 3), max_size=3)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.norm = nn.BatchNorm1d(3)
        self.conv = nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last)
        self.head = nn.Linear(3, 5)
        self.head.weight = self.embedding.weight
        self.register_buffer("first_rows", self.embedding.weight.detach()[:2])
        self.register_buffer("transposed", torch.arange(6.0).reshape(2, 3).t())


def same(ours, theirs):
    assert set(ours) == set(theirs)
    for name in ours:
        assert ours[name].dtype == theirs[name].dtype
        assert torch.equal(ours[name], theirs[name])


def test_the_file_loads_with_one_line_and_without_a_gpu(tmp_path):
    model = Tied()
    path = tmp_path / "model.safetensors"
    save_model(model, path)
    other = Tied()
    other.load_state_dict(load_file(path))
    same(other.state_dict(), model.state_dict())
    assert other.head.weight is other.embedding.weight
    for ours, theirs in zip(get_weights(model), get_weights(other), strict=True):
        assert ours.tobytes() == theirs.tobytes()
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]


@settings(max_examples=examples(50))
@given(st.lists(st.tuples(st.sampled_from(DTYPES), SHAPES), min_size=1, max_size=5))
def test_all_dtypes_and_shapes_are_saved(tmp_path_factory, entries):
    state = {f"entry{i}": (torch.randn(shape) * 3).to(dtype) for i, (dtype, shape) in enumerate(entries)}
    path = tmp_path_factory.mktemp("saved") / "model.safetensors"
    save_model(state, path)
    same(load_file(path), state)


def test_replaces_a_file_and_follows_the_umask(tmp_path):
    path = tmp_path / "model.safetensors"
    plain = tmp_path / "plain"
    plain.touch()
    save_model({"a": torch.zeros(3)}, path)
    before = path.read_bytes()
    # A process that reads the old file still gets all of its content.
    with path.open("rb") as reader:
        save_model({"b": torch.ones(2)}, str(path))
        assert reader.read() == before
    same(load_file(path), {"b": torch.ones(2)})
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)


def assert_refused(tmp_path, model, text, error=WeightsError):
    """Check that the call fails, keeps the existing file and leaves no other."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"before")
    with pytest.raises(error, match=text):
        save_model(model, path)
    assert path.read_bytes() == b"before"
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]


def test_tensors_that_cannot_be_stored_are_refused(tmp_path):
    complex_state = {"ok": torch.zeros(2), "phase": torch.zeros(2, dtype=torch.complex128)}
    assert_refused(tmp_path, complex_state, "safetensors cannot store torch.complex128: phase")
    assert_refused(tmp_path, nn.LazyLinear(2), "weight: not initialised yet")
    assert_refused(tmp_path, nn.Linear(2, 2, device="meta"), "weight: on the meta device")
    assert_refused(tmp_path, {"steps": 3}, "steps: expected a tensor, got int")


def test_a_missing_folder_is_an_error_and_is_not_created(tmp_path):
    with pytest.raises(FileNotFoundError):
        save_model(nn.Linear(2, 2), tmp_path / "missing" / "model.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_a_missing_safetensors_is_an_error_with_the_command_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    assert_refused(tmp_path, nn.Linear(2, 2), "pip install 'safetensors>=0.4'", ConfigError)
