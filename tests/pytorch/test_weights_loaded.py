"""Loading averages made by Flower, whose dtypes may have changed, and weights that do not fit.

Such weights are named in the error, and the model stays unchanged.
"""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from flwr.common import Array, ArrayRecord, MetricRecord, RecordDict
from flwr.server.strategy.aggregate import aggregate
from flwr.serverapp.strategy.strategy_utils import aggregate_arrayrecords
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from properties import examples
from torch import nn
from weight_cases import INTEGERS, Bag, Net, same, shapes, snapshot, train

from flower_gpu.errors import FlowerGPUError, WeightsError
from flower_gpu.pytorch.weights import get_state, get_weights, set_weights

pytestmark = pytest.mark.filterwarnings("error")


def array_records(models, num_examples):
    return [
        RecordDict(
            {
                "arrays": ArrayRecord({k: Array(v) for k, v in get_state(model).items()}),
                "metrics": MetricRecord({"num-examples": n}),
            }
        )
        for model, n in zip(models, num_examples, strict=True)
    ]


@pytest.mark.parametrize("half", [False, True], ids=["float32", "bfloat16"])
def test_flower_averages_are_loaded_into_a_batchnorm_model(half):
    num_examples = [10, 30, 20]
    clients = []
    for seed, steps in enumerate([1, 4, 6]):
        torch.manual_seed(0)
        client = Net()
        train(client, steps, seed)
        clients.append(client.to(torch.bfloat16) if half else client)
    expected = {
        name: sum(
            client.state_dict()[name].double() * n for client, n in zip(clients, num_examples, strict=True)
        )
        / sum(num_examples)
        for name in clients[0].state_dict()
    }
    legacy = aggregate([(get_weights(client), n) for client, n in zip(clients, num_examples, strict=True)])
    message = aggregate_arrayrecords(array_records(clients, num_examples), "num-examples")
    counter = list(expected).index("norm.num_batches_tracked")
    assert legacy[counter].dtype == np.float64, "Flower's average of an integer is a float"

    for load in (
        lambda model: set_weights(model, legacy),
        lambda model: set_weights(model, message.to_numpy_ndarrays()),
    ):
        model = Net().to(torch.bfloat16) if half else Net()
        load(model)
        for name, tensor in model.state_dict().items():
            assert tensor.dtype == clients[0].state_dict()[name].dtype
            if tensor.is_floating_point():
                tolerance = 2**-8 if half else 1e-6
                torch.testing.assert_close(tensor.double(), expected[name], rtol=tolerance, atol=tolerance)
        # (10 * 1 + 30 * 4 + 20 * 6) / 60 = 4.17
        assert model.norm.num_batches_tracked.item() == 4
        assert model.norm.num_batches_tracked.dtype == torch.int64
        assert model.seen.tolist() == [True, False]
        train(model.float(), steps=1)


# -- dtypes that averaging changes ----------------------------------------------------------------


@settings(max_examples=examples(200))
@given(
    st.sampled_from(INTEGERS),
    hnp.arrays(
        st.sampled_from([np.float16, np.float32, np.float64]),
        shapes,
        elements=st.floats(-4e4, 4e4, width=16),
    ),
)
def test_floats_for_integer_buffers_are_rounded_or_refused(dtype, array):
    model = Bag([torch.zeros(array.shape, dtype=dtype)])
    info = torch.iinfo(dtype)
    # Like torch, Python rounds halves to even.
    want = [round(float(value)) for value in array.flat]
    if all(info.min <= value <= info.max for value in want):
        set_weights(model, [array])
        assert model.entry0.dtype == dtype
        assert model.entry0.flatten().tolist() == want
    else:
        with pytest.raises(WeightsError, match=r"entry0, array 1 of 1: expected u?int"):
            set_weights(model, [array])
        assert not model.entry0.any()


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_limits_of_integer_buffers(dtype):
    model = Bag([torch.zeros(2, dtype=dtype)])
    info = torch.iinfo(dtype)
    # float64 has 53 bits, so the largest float64 below the limit of a 64-bit integer is further away.
    largest = float(info.max) if dtype.itemsize < 8 else np.nextafter(float(info.max), 0)
    set_weights(model, [np.array([info.min, largest])])
    assert model.entry0.tolist() == [info.min, int(largest)]
    for value in (float(info.max + 1), np.inf, -np.inf, np.nan):
        with pytest.raises(WeightsError, match=r"entry0.* got float64 with the value"):
            set_weights(model, [np.array([0, value])])
    below = np.nextafter(float(info.min), -np.inf) if dtype.itemsize == 8 else info.min - 1.0
    if info.min or dtype.itemsize < 8:
        with pytest.raises(WeightsError):
            set_weights(model, [np.array([0, below])])
    assert model.entry0.tolist() == [info.min, int(largest)]


def test_floats_for_boolean_buffers():
    model = Bag([torch.zeros(5, dtype=torch.bool)])
    set_weights(model, [np.array([0, 0.25, 0.75, 1, -0.25])])
    assert model.entry0.tolist() == [False, False, True, True, False]
    for value in (2.0, -1.0, np.nan):
        with pytest.raises(WeightsError, match=r"expected bool \(0 to 1\)"):
            set_weights(model, [np.full(5, value)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_zero_dimensional_float64_is_accepted(dtype):
    """numpy before 2.0 turns 0-d arrays of any float type into float64 in an average."""
    model = Bag([torch.tensor(0.0, dtype=dtype)])
    for value in (np.float64(1.1), np.array(1.1), np.array(1e300)):
        set_weights(model, [value])
        assert model.entry0.dtype == dtype
        assert model.entry0.item() == torch.tensor(float(value)).to(dtype).item()


def test_bfloat16_is_rounded_to_nearest():
    model = Bag([torch.zeros(4, dtype=torch.bfloat16)])
    array = np.array([1.001, 3.14159, -np.inf, np.nan], dtype=np.float32)
    set_weights(model, [array])
    want = torch.tensor([1.0, 3.140625, -torch.inf, torch.nan])
    torch.testing.assert_close(model.entry0.float(), want, rtol=0, atol=0, equal_nan=True)


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
