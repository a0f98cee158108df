"""Conversion of a state_dict to numpy arrays and back."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from properties import examples
from torch import nn
from weight_cases import NUMPY, Bag, Net, same, snapshot, tensors, train

from flower_gpu.pytorch.weights import get_state, get_weights, set_weights

pytestmark = pytest.mark.filterwarnings("error")


# -- round trip -----------------------------------------------------------------------------------


@settings(max_examples=examples(150))
@given(st.lists(tensors(), max_size=6))
def test_round_trip_keeps_every_bit(entries):
    model = Bag(entries)
    before = snapshot(model)
    weights = get_weights(model)
    assert [array.tobytes() for array in get_state(model).values()] == [each.tobytes() for each in weights]
    for tensor, array in zip(model.state_dict().values(), weights, strict=True):
        assert type(array) is np.ndarray
        assert array.shape == tuple(tensor.shape)
        assert array.dtype == NUMPY.get(tensor.dtype, np.float32)
        assert array.flags.c_contiguous and array.flags.writeable
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.zero_()
    set_weights(model, weights)
    same(model, before)


@settings(max_examples=examples(100))
@given(st.data())
def test_any_memory_layout_of_an_array_is_loaded(data):
    tensor = data.draw(tensors())
    model = Bag([tensor])
    before = snapshot(model)
    (array,) = get_weights(model)
    layout = data.draw(st.sampled_from(LAYOUTS))
    changed = layout(array)
    assert changed.shape == array.shape
    copy_of_input = changed.copy()
    with torch.no_grad():
        model.entry0.zero_()
    set_weights(model, [changed])
    same(model, before)
    assert changed.tobytes() == copy_of_input.tobytes()


def fortran(array):
    return np.asfortranarray(array) if array.ndim else array


def every_second(array):
    return np.stack([array, array], axis=-1)[..., 0]


def backwards(array):
    return np.ascontiguousarray(array[::-1])[::-1] if array.ndim else array


def swapped(array):
    return array.astype(array.dtype.newbyteorder("S"))


def read_only(array):
    array = array.copy()
    array.flags.writeable = False
    return array


def field(array):
    """Return a view with strides that are not a multiple of the item size."""
    records = np.zeros(array.shape, dtype=[("pad", "u1"), ("value", array.dtype)])
    records["value"] = array
    return records["value"]


def frombuffer(array):
    return np.frombuffer(array.tobytes(), array.dtype).reshape(array.shape)


def misaligned(array):
    """Return a copy at an address that is not a multiple of the item size, where torch can crash."""
    memory = np.zeros(array.nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64 + max(array.itemsize // 2, 1)
    moved = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    moved[...] = array
    return moved


LAYOUTS = [fortran, every_second, backwards, swapped, read_only, field, frombuffer, misaligned]


@pytest.mark.parametrize("dtype", NUMPY, ids=str)
@pytest.mark.parametrize("shape", [(), (3,), (40, 50)], ids=str)
def test_misaligned_arrays_are_loaded_without_a_crash(dtype, shape):
    array = np.ones(shape, NUMPY[dtype])
    model = Bag([torch.zeros(shape, dtype=dtype)])
    set_weights(model, [misaligned(array)])
    assert np.array_equal(get_weights(model)[0], array)


def test_conjugated_and_negated_views_give_their_values():
    tensor = torch.tensor([1 + 2j, 3 - 4j])
    state = get_state({"conj": tensor.conj(), "neg": tensor.conj().imag})
    assert state["conj"].tolist() == [1 - 2j, 3 + 4j]
    assert state["neg"].tolist() == [-2.0, 4.0]


def test_channels_last_model_gives_contiguous_arrays_and_keeps_its_format():
    model = nn.Conv2d(8, 8, 3).to(memory_format=torch.channels_last)
    reference = snapshot(model)
    weights = get_weights(model)
    assert weights[0].flags.c_contiguous
    assert np.array_equal(weights[0], model.weight.detach().numpy())
    set_weights(model, weights)
    same(model, reference)
    assert model.weight.is_contiguous(memory_format=torch.channels_last)


# -- a real model ---------------------------------------------------------------------------------


def test_arrays_do_not_change_when_training_continues():
    model = Net()
    weights, state = get_weights(model), get_state(model)
    kept = [array.copy() for array in weights]
    train(model, steps=2)
    assert not np.array_equal(get_weights(model)[0], kept[0])
    for array, named, original in zip(weights, state.values(), kept, strict=True):
        assert np.array_equal(array, original)
        assert np.array_equal(named, original)


def test_model_does_not_change_with_the_arrays():
    model, reference = Net(), Net()
    weights = get_weights(reference)
    set_weights(model, weights)
    for array in weights:
        array[...] = 0
    same(model, reference)
    train(model, steps=1)
    assert all((array == 0).all() for array in weights)


def test_loading_keeps_the_tensors_that_an_optimizer_holds():
    model = Net()
    train(model, steps=1)
    parameters = list(model.parameters())
    pointers = [tensor.data_ptr() for tensor in model.state_dict().values()]
    gradients = [parameter.grad for parameter in parameters]
    set_weights(model, get_weights(Net()))
    assert [tensor.data_ptr() for tensor in model.state_dict().values()] == pointers
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert all(p.requires_grad and p.is_leaf for p in model.parameters())
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))


def test_copies_no_more_than_needed():
    class Watched(nn.Linear):
        def load_state_dict(self, state_dict, *args, **kwargs):
            self.loaded = [tensor.data_ptr() for tensor in state_dict.values()]
            return super().load_state_dict(state_dict, *args, **kwargs)

    model = Watched(3, 2)
    first, second = get_weights(model), get_weights(model)
    pointers = {array.ctypes.data for array in (*first, *second)}
    pointers |= {tensor.data_ptr() for tensor in model.state_dict().values()}
    assert len(pointers) == 6
    # A writable array in native byte order is copied into the model without an intermediate copy.
    set_weights(model, first)
    assert model.loaded == [array.ctypes.data for array in first]


# -- unusual models -------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight


def test_tied_weights_stay_tied():
    model, other = Tied(), Tied()
    weights = get_weights(other)
    assert len(weights) == 2
    # The arrays have separate memory, so changing one in place leaves the other unchanged.
    weights[0] += 0
    assert not np.shares_memory(weights[0], weights[1])
    set_weights(model, weights)
    same(model, other)
    assert model.head.weight is model.embedding.weight
    set_weights(model, [np.zeros((5, 3), np.float32), np.ones((5, 3), np.float32)])
    assert (model.embedding.weight == 1).all()


def test_model_whose_state_dict_is_not_its_tensors():
    """The model has extra state and state_dict hooks, which torch itself can load."""

    class Counted(nn.Linear):
        steps = 0

        def get_extra_state(self):
            return torch.tensor(self.steps)

        def set_extra_state(self, state):
            self.steps = int(state)

    model, other = Counted(2, 2), Counted(2, 2)
    other.steps = 7
    set_weights(model, get_weights(other))
    assert model.steps == 7
    same(model, other)


def test_versions_of_modules_are_kept():
    """Without its version, a module may treat the arrays as those of an older release."""

    class Versioned(nn.Linear):
        _version = 3

        def _load_from_state_dict(self, state_dict, prefix, local_metadata, *rest):
            self.loaded_version = local_metadata.get("version")
            super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)

    model = Versioned(2, 2)
    set_weights(model, get_weights(model))
    assert model.loaded_version == 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_round_trip_on_the_gpu():
    model, other = Net().cuda().to(memory_format=torch.channels_last), Net()
    set_weights(model, get_weights(other))
    assert all(tensor.is_cuda for tensor in model.state_dict().values())
    same(model, other)
    assert all(array.flags.c_contiguous for array in get_weights(model))
    set_weights(other, get_weights(model))
    same(model, other)
