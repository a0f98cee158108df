"""Weights that do not fit are named in the error, and the model stays unchanged."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from torch import nn
from weight_cases import Bag, Net, same, snapshot

from flower_gpu.errors import FlowerGPUError, WeightsError
from flower_gpu.pytorch.weights import get_state, get_weights, set_weights

pytestmark = pytest.mark.filterwarnings("error")


# -- arrays that do not fit -----------------------------------------------------------------------


def refused(model, call, *texts):
    """Check that the call fails with all texts in its message and leaves the model unchanged."""
    before = snapshot(model)
    with pytest.raises(WeightsError) as caught:
        call()
    assert isinstance(caught.value, FlowerGPUError) and isinstance(caught.value, ValueError)
    for text in texts:
        assert text in str(caught.value)
    same(model, before)


def change(i, array):
    weights = get_weights(Net())
    weights[i] = array
    return weights


CONV, TRACKED, HEAD = "conv.weight", "norm.num_batches_tracked", "head.weight"
ORDER = list(Net().state_dict())


@pytest.mark.parametrize(
    ("name", "array", "texts"),
    [
        (
            HEAD,
            np.zeros((4, 3), np.float32),
            "head.weight, array 10 of 11: expected shape (3, 4) float32, got shape (4, 3) float32",
        ),
        (
            HEAD,
            np.zeros((3, 4)),
            "head.weight, array 10 of 11: expected shape (3, 4) float32, got shape (3, 4) float64; "
            "convert it with .astype('float32')",
        ),
        (HEAD, np.zeros(12, np.float32), "got shape (12,) float32"),
        (HEAD, np.zeros((3, 4), np.int64), "got shape (3, 4) int64; convert"),
        (HEAD, np.zeros((3, 4), np.complex64), "got shape (3, 4) complex64"),
        (HEAD, np.zeros((3, 4), object), "got shape (3, 4) object"),
        (HEAD, torch.zeros(3, 4), "got Tensor, not a numpy array"),
        (HEAD, None, "got NoneType"),
        ("scale", 1.0, "expected shape () float32, got float, not a numpy array"),
        ("scale", np.zeros(1, np.float32), "expected shape () float32, got shape (1,) float32"),
        (TRACKED, np.array(3, np.int32), "expected shape () int64, got shape () int32; convert"),
        (TRACKED, np.array(np.nan), "expected int64"),
        (TRACKED, np.array(3j), "expected shape () int64, got shape () complex128"),
        ("seen", np.array([1, 0]), "expected shape (2,) bool, got shape (2,) int64"),
    ],
)
def test_an_array_that_does_not_fit_is_refused(name, array, texts):
    model = Net()
    position = ORDER.index(name)
    weights = change(position, array)
    where = f"{name}, array {position + 1} of {len(ORDER)}: "
    refused(model, lambda: set_weights(model, weights), where, texts)


def test_several_misfits_are_named_up_to_a_limit():
    model = Net()
    weights = [np.zeros(9, np.float32)] * len(ORDER)
    with pytest.raises(WeightsError) as caught:
        set_weights(model, weights)
    lines = str(caught.value).splitlines()
    assert [line.split(",")[0] for line in lines] == ORDER[:5]
    assert lines[-1].endswith(f" and {len(ORDER) - 5} more")


def test_a_wrong_number_of_arrays_is_refused():
    model = Net()
    weights = get_weights(Net())
    shorter = weights[:-1]
    refused(model, lambda: set_weights(model, shorter), "expected 11 arrays (scale, ", "got 10")
    refused(model, lambda: set_weights(model, [*weights, weights[0]]), "got 12")
    refused(model, lambda: set_weights(model, []), "got 0")
    parameters = [parameter.detach().numpy() for parameter in Net().parameters()]
    refused(model, lambda: set_weights(model, parameters), "number of parameters", "get_weights")


def test_containers_other_than_lists_are_refused():
    model = Net()
    weights, state = get_weights(Net()), get_state(Net())
    refused(model, lambda: set_weights(model, state), "got dict")
    refused(model, lambda: set_weights(model, np.zeros((11, 1))), "got ndarray")
    refused(model, lambda: set_weights(model, "weights"), "got str")
    set_weights(model, tuple(weights))
    assert np.array_equal(get_weights(model)[0], weights[0])


def extra_state():
    class Extra(nn.Linear):
        def get_extra_state(self):
            return {"steps": 3}

        def set_extra_state(self, state): ...

    return Extra(2, 2)


@pytest.mark.parametrize(
    ("build", "texts"),
    [
        (lambda: Bag([torch.zeros(2).to(torch.float8_e4m3fn)]), "entry0: float8_e4m3fn has"),
        (lambda: Bag([torch.eye(2).to_sparse()]), "entry0: expected a dense tensor"),
        (lambda: nn.Linear(2, 2, device="meta"), "weight: on the meta device"),
        (lambda: nn.LazyLinear(2), "weight: not initialised yet"),
        (extra_state, "_extra_state: expected a tensor, got dict"),
    ],
    ids=["float8", "sparse", "meta", "lazy", "extra_state"],
)
def test_models_without_numpy_equivalent_are_refused(build, texts):
    with pytest.raises(WeightsError) as caught:
        get_weights(build())
    assert str(caught.value).startswith(texts)
    model = build()
    arrays = [np.zeros(2, np.float32)] * len(model.state_dict())
    with pytest.raises(WeightsError) as caught:
        set_weights(model, arrays)
    assert str(caught.value).startswith(texts)


def test_quantised_tensors_are_refused():
    # Quantised tensors are deprecated in torch, which warns about them.
    with warnings.catch_warnings(action="ignore"):
        tensor = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    with pytest.raises(WeightsError, match=r"^q: expected a dense tensor, got torch.qint8"):
        get_state({"q": tensor})
