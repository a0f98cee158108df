"""Moving modules, batches and auxiliary variables to a device, and results back."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

import flower_gpu
from flower_gpu.errors import ConfigError
from flower_gpu.pytorch.device import device, to_device, to_numpy

CUDA = torch.cuda.is_available()
on_gpu = pytest.mark.gpu
DEVICES = ["cpu", "meta", pytest.param("cuda", marks=[on_gpu, pytest.mark.skipif(not CUDA, reason="no GPU")])]
#: Devices to which a tensor on the CPU has to be moved.
OTHER_DEVICES = DEVICES[1:]


class Pair(NamedTuple):
    inputs: torch.Tensor
    label: Any


class Encoding(UserDict):  # type: ignore[type-arg]
    """Like transformers' BatchEncoding, an object that moves itself in place."""

    def to(self, device: torch.device) -> Encoding:
        self.data = {key: value.to(device) for key, value in self.data.items()}
        return self


class Quantity:
    def to(self, unit: str) -> Quantity:
        raise ValueError(f"no such unit: {unit}")


def batch() -> dict[str, Any]:
    shared = torch.arange(3.0)
    return {
        "list": [torch.ones(2), None, "text", 3],
        "tuple": (shared, {"deep": shared}),
        "named": Pair(torch.ones(1), 7),
        "ordered": OrderedDict(b=torch.ones(1), a=torch.ones(1)),
        "proxy": MappingProxyType({"t": torch.ones(1)}),
        "default": defaultdict(list, a=[torch.ones(1)]),
        "sparse": [torch.eye(3).to_sparse()],
        "quantity": Quantity(),
        "model": nn.Linear(3, 2),
    }


def tensors_in(thing: Any) -> list[torch.Tensor]:
    tensors: list[torch.Tensor] = []

    def collect(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif hasattr(value, "items"):
            [collect(item) for item in value.values()]
        elif isinstance(value, list | tuple):
            [collect(item) for item in value]

    collect(thing)
    return tensors


@pytest.mark.parametrize("target", DEVICES)
def test_every_nested_tensor_is_moved_and_other_values_are_unchanged(target: str) -> None:
    before = batch()
    after = to_device(before, target)
    assert len(tensors_in(after)) == len(tensors_in(before)) == 9
    assert {tensor.device.type for tensor in tensors_in(after)} == {target}
    assert {tensor.device.type for tensor in tensors_in(before)} == {"cpu"}
    assert after["list"][1:] == [None, "text", 3]
    assert type(after["named"]) is Pair and after["named"].label == 7
    assert type(after["ordered"]) is OrderedDict and list(after["ordered"]) == ["b", "a"]
    assert after["default"]["new"] == [] and after["sparse"][0].is_sparse
    assert after["quantity"] is before["quantity"] and after["model"] is before["model"]
    assert {tensor.device.type for tensor in after["model"].state_dict().values()} == {target}


def test_the_default_is_the_workers_device() -> None:
    assert device() == flower_gpu.device() == torch.device("cuda:0" if CUDA else "cpu")
    assert to_device(torch.ones(1)).device == device()
    moved = torch.ones(1, device=device())
    assert to_device([moved])[0] is moved


@pytest.mark.parametrize("target", DEVICES)
def test_objects_with_a_to_method_move_themselves(target: str) -> None:
    encoding = Encoding(ids=torch.ones(2))
    packed = nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    assert to_device(encoding, target) is encoding
    assert encoding["ids"].device.type == target
    assert to_device(packed, target).data.device.type == target


@pytest.mark.parametrize("target", DEVICES)
def test_numpy_arrays_of_numbers_become_tensors(target: str) -> None:
    names = np.array(["a", "b"])
    moved = to_device({"x": np.ones((2, 3), np.float32), "names": names, "n": np.float64(1)}, target)
    assert moved["x"].dtype == torch.float32 and moved["x"].shape == (2, 3)
    assert moved["x"].device.type == target
    assert moved["names"] is names
    assert isinstance(moved["n"], np.float64)


def test_on_the_cpu_a_numpy_array_is_not_copied_unless_it_is_read_only() -> None:
    array = np.zeros(3)
    shared = to_device(array, "cpu")
    array[0] = 1
    assert shared[0] == 1
    array.flags.writeable = False
    copied = to_device(array, "cpu")
    copied[1] = 5
    assert array[1] == 0
    assert to_device(array[::-1], "cpu").tolist() == [0, 0, 1]
    assert to_device(array.astype(">f8"), "cpu").tolist() == [1, 0, 0]


@pytest.mark.parametrize("target", OTHER_DEVICES)
def test_leaves_stay_leaves_and_computed_tensors_keep_their_history(target: str) -> None:
    leaf = torch.ones(2, requires_grad=True)
    moved = to_device(leaf, target)
    assert moved.is_leaf and moved.requires_grad
    assert isinstance(to_device(nn.Parameter(torch.ones(1)), target), nn.Parameter)
    computed = to_device(leaf * 2, target)
    assert computed.grad_fn is not None


@pytest.mark.parametrize("wrong", ["gpu", "cuda:99", 3.5, True, "xla:0", -7])
def test_a_wrong_device_is_named(wrong: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        to_device(torch.ones(1), wrong)
    assert str(wrong) in str(caught.value)
    assert len(str(caught.value)) < 600


def test_a_tensor_or_module_without_values_is_refused() -> None:
    with pytest.raises(ConfigError, match="meta device, which holds no values"):
        to_device([torch.ones(1, device="meta")], "cpu")
    with pytest.raises(ConfigError, match="Linear is on the meta device"):
        to_device(nn.Linear(1, 1, device="meta"), "cpu")


@pytest.mark.parametrize("source", [DEVICES[0], DEVICES[2]])
def test_results_come_back_as_arrays(source: str) -> None:
    result = to_numpy(
        {
            "loss": torch.tensor(2.5, device=source, requires_grad=True),
            "pair": Pair(torch.ones(2, device=source), "a"),
            "half": torch.tensor([1.5], device=source, dtype=torch.bfloat16),
            "conj": torch.tensor([1 + 2j], device=source).conj(),
            "proxy": MappingProxyType({"t": torch.ones(1, device=source)}),
            "none": None,
        }
    )
    assert result["loss"].shape == () and result["loss"] == 2.5
    assert type(result["pair"]) is Pair and result["pair"].inputs.tolist() == [1, 1]
    assert result["half"].dtype == np.float32 and result["half"] == [1.5]
    assert result["conj"] == [1 - 2j]
    assert result["proxy"]["t"] == [1]
    assert result["none"] is None


def test_arrays_of_cpu_tensors_share_their_memory() -> None:
    tensor = torch.zeros(3)
    [array] = to_numpy([tensor])
    tensor[0] = 1
    assert array[0] == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torch.eye(2).to_sparse(), "sparse"),
        (lambda: torch.ones(1, device="meta"), "meta"),
        (lambda: torch.ones(1).to(torch.float8_e4m3fn), "float8"),
        (lambda: nn.Linear(1, 1), "get_weights"),
    ],
)
def test_values_without_a_numpy_array_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        to_numpy({"x": make()})


def test_a_round_trip_gives_the_same_values() -> None:
    arrays = [np.arange(6, dtype=np.int64).reshape(2, 3), np.array(1.5), np.array([True, False])]
    for new, old in zip(to_numpy(to_device(arrays)), arrays, strict=True):
        assert new.dtype == old.dtype
        assert np.array_equal(new, old)
