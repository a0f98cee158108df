"""Replies are summed as they arrive. The mean equals Flower's, but needs memory for only one model."""

from __future__ import annotations

import gc
import tracemalloc
import warnings
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from array_records import arrived_from
from flwr.app import ArrayRecord, Error, Message, MetricRecord, RecordDict
from flwr.serverapp.exception import InconsistentMessageReplies
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg
from hypothesis import given, settings
from hypothesis import strategies as st
from properties import examples
from streaming_grid import content_of, reply_of

from flower_gpu import FedAvg
from flower_gpu.errors import InvalidResultError
from flower_gpu.strategies.averaging import ReplySum, SumItem, without_arrays
from flower_gpu.strategies.running_mean import RunningMean
from flower_gpu.strategies.streaming import ComingReplies, streamed_strategies

FLOATS = ["float16", "float32", "float64", ">f4", "longdouble"]
COMPLEX = ["complex64", "complex128"]
INTEGERS = ["int8", "int64", "uint8", "uint64", "bool"]


def summed(replies: Iterable[Message], *, keeps_integers: bool = True) -> Generator[SumItem, None, None]:
    """Sum replies as a host does."""
    total = ReplySum("num-examples", keeps_integers=keeps_integers)
    for reply in replies:
        total.add(reply)
        yield without_arrays(reply)
        del reply
    yield "a host", total


def coming(replies: Iterable[Message]) -> ComingReplies:
    """Return replies that arrive one by one or as a sum."""
    return ComingReplies(
        (reply for reply in replies), lambda key, keeps, in_order: summed(replies, keeps_integers=keeps)
    )


@st.composite
def federations(draw: Callable[..., Any]) -> list[Message]:
    """Replies of a few nodes that trained the same model."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    kinds = st.sampled_from(FLOATS + COMPLEX + INTEGERS)
    shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
    model = draw(st.dictionaries(st.sampled_from("abcd"), st.tuples(kinds, shapes, st.booleans())))
    weights = draw(
        st.lists(st.integers(0, 10**6), min_size=1, max_size=6)
        | st.lists(st.floats(0, 1e6, width=32), min_size=1, max_size=6)
    )
    return [
        reply_of(
            node,
            content_of(
                {key: _random(rng, *traits) for key, traits in model.items()},
                {"num-examples": weight, "loss": float(rng.normal()), "each": rng.normal(size=3).tolist()},
            ),
        )
        for node, weight in enumerate(weights, 1)
    ]


def _random(rng: np.random.Generator, kind: str, shape: tuple[int, ...], is_fortran: bool) -> Any:
    dtype = np.dtype(kind)
    if dtype.kind in "biu":
        array = rng.integers(0, 2 if dtype.kind == "b" else 100, shape).astype(dtype)
    else:
        real, imaginary = rng.uniform(-9, 9, (2, *shape))
        array = (real + 1j * imaginary if dtype.kind == "c" else real).astype(dtype)
    return np.asfortranarray(array) if is_fortran and shape else array


@given(replies=federations())
def test_the_mean_of_a_stream_equals_flowers_mean(replies: list[Message]) -> None:
    """With Flower's strategy, even the dtype is Flower's: the mean of integers is a float64."""
    summable = coming(replies)
    cases: list[tuple[FlowerFedAvg, Iterable[Message]]] = [
        (FedAvg(), iter(replies)),
        (FedAvg(), replies),
        (FedAvg(exact_order=True), iter(replies)),
        (FlowerFedAvg(), summable),
    ]
    if not sum(reply.content["metrics"]["num-examples"] for reply in replies):
        for strategy, given_replies in [(FlowerFedAvg(), replies), *cases]:
            with streamed_strategies(), pytest.raises(ZeroDivisionError):
                strategy.aggregate_train(1, given_replies)
        return
    expected, expected_metrics = FlowerFedAvg().aggregate_train(1, replies)
    for strategy, given_replies in cases:
        with streamed_strategies():
            averaged, metrics = strategy.aggregate_train(1, given_replies)
        assert metrics == expected_metrics
        assert list(averaged) == list(expected)
        for key, array in averaged.items():
            sent = replies[0].content["arrays"][key].numpy()
            is_ours = isinstance(strategy, FedAvg)
            _assert_mean(array.numpy(), expected[key].numpy(), sent, is_rounded=is_ours)
    assert summable.all() == [], "the replies were summed"


def _assert_mean(actual: Any, expected: Any, sent: Any, *, is_rounded: bool) -> None:
    assert actual.shape == sent.shape == expected.shape
    assert actual.dtype == (sent.dtype.newbyteorder("=") if is_rounded else expected.dtype)
    if is_rounded and sent.dtype.kind in "biu":
        assert np.all(np.abs(actual - expected) <= 0.5 + 1e-6)
    else:
        tolerance = 1e-6 if expected.dtype != np.float16 else 5e-3  # Flower sums float16 in its 11 bits
        assert np.allclose(actual, expected, rtol=tolerance, atol=9 * tolerance)


def test_the_mean_of_float16_is_rounded_only_once() -> None:
    values = np.random.default_rng(1).normal(size=(200, 50)).astype(np.float16)
    replies = (reply_of(node, content_of({"w": row}, {"num-examples": 1})) for node, row in enumerate(values))
    averaged, _ = FedAvg().aggregate_train(1, replies)
    assert np.array_equal(averaged["w"].numpy(), values.astype(np.float64).mean(axis=0).astype(np.float16))


def test_arrays_larger_than_the_scratch_memory_are_summed_correctly() -> None:
    rng = np.random.default_rng(2)
    models = [rng.normal(size=(700, 700)).astype(np.float32) for _ in range(3)]
    models[1] = np.asfortranarray(models[1])
    replies = (
        reply_of(node, content_of({"w": model}, {"num-examples": node}))
        for node, model in enumerate(models, 1)
    )
    averaged, _ = FedAvg().aggregate_train(1, replies)
    expected = np.average(np.asarray(models, np.float64), axis=0, weights=[1, 2, 3])
    assert np.allclose(averaged["w"].numpy(), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        (("int32", "int64"), "int64"),
        (("int64", "float32"), "float64"),
        (("uint8", "float32"), "float32"),
        (("float16", "float32"), "float32"),
    ],
)
@pytest.mark.parametrize("is_reversed", [False, True], ids=["in order", "reversed"])
def test_the_dtype_of_a_mean_does_not_depend_on_the_order_of_replies(
    kinds: tuple[str, str], expected: str, is_reversed: bool
) -> None:
    first, second = (np.array([value], kind) for value, kind in zip((1, 2), kinds, strict=True))
    replies = [reply_of(1, content_of({"w": first}, {"num-examples": 3}))]
    replies.append(reply_of(2, content_of({"w": second}, {"num-examples": 1})))
    if is_reversed:
        replies.reverse()
    for coming_replies in (iter(replies), coming(replies)):
        averaged, _ = FedAvg().aggregate_train(1, coming_replies)
        assert averaged["w"].dtype == expected
        assert averaged["w"].numpy()[0] == (1 if expected == "int64" else 1.25)


@pytest.mark.parametrize("kind", ["int64", "uint64"])
def test_integers_too_large_for_floats_stay_in_range(kind: str) -> None:
    limits = np.iinfo(kind)
    array = np.array([limits.min, limits.max], kind)
    replies = (reply_of(node, content_of({"w": array}, {"num-examples": 1})) for node in (1, 2))
    averaged, _ = FedAvg().aggregate_train(1, replies)
    assert np.array_equal(averaged["w"].numpy(), array)


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        (np.zeros((2, 3)), np.zeros((3, 2)), r"'w' of node 2 has shape \(3, 2\), and \(2, 3\)"),
        (np.zeros(2, np.float32), np.zeros(2, complex), "'w' of node 2 has dtype complex128"),
        (np.array(["a"]), np.array(["b"]), "'w' of node 1 has dtype <U1"),
    ],
)
def test_arrays_that_cannot_be_averaged_are_named(first: Any, second: Any, text: str) -> None:
    replies = [reply_of(1, content_of({"w": first}, {"num-examples": 1}))]
    replies.append(reply_of(2, content_of({"w": second}, {"num-examples": 1})))
    with pytest.raises((TypeError, ValueError)):  # numpy's error does not name the array
        FlowerFedAvg().aggregate_train(1, replies)
    for given_replies in (replies, iter(replies)):
        with pytest.raises(InvalidResultError, match=text):
            FedAvg().aggregate_train(1, given_replies)


def _after_good(second: RecordDict | Error) -> list[RecordDict | Error]:
    return [content_of({"w": [1.0]}, {"num-examples": 1}), second]


def _with_copy(content: RecordDict, name: str) -> RecordDict:
    record = content[name]
    return RecordDict({**content, f"{name} again": record})


GOOD = content_of({"w": [3.0]}, {"num-examples": 1})
CASES = {
    "no reply": [],
    "errors only": [Error(1, "no luck"), Error(2, "no disk")],
    "one error": _after_good(Error(1, "no luck")),
    "other keys": _after_good(content_of({"v": [1.0]}, {"num-examples": 1})),
    "one key more": _after_good(content_of({"w": [1.0], "v": [1.0]}, {"num-examples": 1})),
    "record of another name": _after_good(RecordDict({"model": GOOD["arrays"], "metrics": GOOD["metrics"]})),
    "two ArrayRecords": _after_good(_with_copy(GOOD, "arrays")),
    "no ArrayRecord": _after_good(RecordDict({"metrics": MetricRecord({"num-examples": 1})})),
    "two MetricRecords": _after_good(_with_copy(GOOD, "metrics")),
    "no MetricRecord": _after_good(RecordDict({"arrays": GOOD["arrays"]})),
    "no weight": [content_of({"w": [1.0]}, {"loss": 1}), content_of({"w": [1.0]}, {"loss": 1})],
    "weight missing once": _after_good(content_of({"w": [1.0]}, {"loss": 1})),
    "other metrics": _after_good(content_of({"w": [1.0]}, {"num-examples": 1, "loss": 1})),
    "list as weight": _after_good(content_of({"w": [1.0]}, {"num-examples": [1, 2]})),
    "fits again": [*_after_good(content_of({"v": [1.0]}, {"num-examples": 1})), GOOD, Error(1, "no luck")],
}


@pytest.mark.parametrize("case", CASES)
def test_replies_are_checked_and_logged_as_by_flower(case: str, caplog: pytest.LogCaptureFixture) -> None:
    replies = [reply_of(node, content) for node, content in enumerate(CASES[case], 1)]
    expected = _outcome(FlowerFedAvg(), replies, caplog)
    assert _outcome(FedAvg(), replies, caplog) == expected
    assert _outcome(FedAvg(), iter(replies), caplog) == expected
    assert _outcome(FedAvg(exact_order=True), iter(replies), caplog) == expected
    with streamed_strategies():
        assert _outcome(FlowerFedAvg(), coming(replies), caplog) == expected


def _outcome(
    strategy: FlowerFedAvg, replies: Iterable[Message], caplog: pytest.LogCaptureFixture
) -> tuple[Any, list[str]]:
    caplog.clear()
    outcome: Any
    try:
        arrays, metrics = strategy.aggregate_train(1, replies)
        outcome = arrays and arrays["w"].numpy().tolist(), metrics
    except InconsistentMessageReplies as error:
        outcome = str(error)
    return outcome, [record.getMessage() for record in caplog.records]


def test_a_reply_is_freed_before_the_next_is_read() -> None:
    alive: list[Any] = []

    def replies() -> Iterator[Message]:
        for node in range(1, 6):
            assert not [ref for ref in alive if ref() is not None], f"before node {node}"
            yield tracked_reply(node)

    def tracked_reply(node: int) -> Message:
        reply = reply_of(node, content_of({"w": np.ones(9), "v": np.ones(2)}, {"num-examples": 1}))
        record = reply.content["arrays"]
        alive.extend(map(weakref.ref, (reply, reply.content, record, record["w"], record["v"])))
        return reply

    gc.disable()  # replies must not wait for the garbage collector
    try:
        FedAvg().aggregate_train(1, replies())
        FedAvg().aggregate_train(1, ComingReplies((), lambda *_: summed(replies())))
    finally:
        gc.enable()
    assert len(alive) == 50


def test_mapped_memory_of_a_reply_is_freed_before_the_next_is_read() -> None:
    maps: list[int] = []

    def replies() -> Iterator[Message]:
        for node in range(1, 5):
            maps.append(_mapped_files())
            yield reply_of(node, arrived_from(content_of({"w": np.ones(300_000)}, {"num-examples": 1})))

    maps_before = _mapped_files()
    averaged, _ = FedAvg().aggregate_train(1, replies())
    assert maps == [maps_before] * 4
    assert np.all(averaged["w"].numpy() == 1)
    reply = reply_of(1, arrived_from(content_of({"w": np.ones(300_000)}, {"num-examples": 1})))
    assert _mapped_files() > maps_before, "the count includes a reply that is alive"
    del reply


def _mapped_files() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:flower-gpu")


def test_memory_does_not_grow_with_the_number_of_replies() -> None:
    def peak_bytes(number: int) -> int:
        model = np.ones(250_000, np.float32)
        tracemalloc.start()
        try:
            FedAvg().aggregate_train(
                1, (reply_of(node, content_of({"w": model}, {"num-examples": 1})) for node in range(number))
            )
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak_bytes(1)  # runs the imports of the first use
    assert peak_bytes(40) < peak_bytes(3) + 500_000, "less than half a model more"


def test_metrics_of_a_stream_have_no_arrays_and_the_error_says_so() -> None:
    seen: list[RecordDict] = []

    def aggregate(contents: list[RecordDict], key: str) -> MetricRecord:
        seen.extend(contents)
        return MetricRecord({"clients": len(contents)})

    replies = [reply_of(node, content_of({"w": [1.0]}, {"num-examples": 1})) for node in (1, 2)]
    strategy = FedAvg(train_metrics_aggr_fn=aggregate)
    _, metrics = strategy.aggregate_train(1, iter(replies))
    assert metrics == {"clients": 2} and [content["metrics"]["num-examples"] for content in seen] == [1, 1]
    assert list(seen[0]["arrays"]) == ["w"] and "already summed" in repr(seen[0])
    with pytest.raises(AttributeError, match="override aggregate_train"):
        seen[0]["arrays"]["w"].numpy()
    strategy.aggregate_train(1, replies)
    assert seen[2]["arrays"]["w"].numpy() == [1.0], "a list of replies keeps its arrays"
    assert replies[0].content["arrays"]["w"].numpy() == [1.0], "the replies of the caller are unchanged"


@settings(max_examples=examples(25))
@given(order=st.permutations(range(1, 9)), late=st.sets(st.integers(1, 8), max_size=3))
def test_exact_order_gives_the_same_bits_for_any_order_of_arrival(order: list[int], late: set[int]) -> None:
    def replies(nodes: Iterable[int]) -> Generator[Message, None, None]:
        return (_noise(node) for node in nodes if node not in late)

    strategy = FedAvg(exact_order=True)
    expected = _bits(strategy.aggregate_train(1, list(replies(range(1, 9)))))
    assert _bits(strategy.aggregate_train(1, list(replies(order)))) == expected
    assert _bits(strategy.aggregate_train(1, replies(order))) == expected


def _noise(node: int) -> Message:
    rng = np.random.default_rng(node)
    weight = int(rng.integers(1, 1000))
    return reply_of(node, content_of({"w": rng.normal(size=100)}, {"num-examples": weight, "l": 0.1 * node}))


def _bits(result: tuple[ArrayRecord | None, MetricRecord | None]) -> tuple[bytes, float] | None:
    arrays, metrics = result
    return None if arrays is None or metrics is None else (arrays["w"].data, metrics["l"])


def test_sums_of_blocks_are_added_in_order() -> None:
    nodes, size = range(1, 24), 4
    replies = {node: _noise(node) for node in nodes}

    def in_blocks(*_: Any) -> Generator[SumItem, None, None]:
        for first in range(1, 24, size):
            yield from summed(replies[node] for node in range(first, min(first + size, 24)))

    averaged, _ = FedAvg().aggregate_train(1, ComingReplies((), in_blocks))
    total, weights = np.zeros(100), 0
    for first in range(1, 24, size):
        block_sum = np.zeros(100)
        for node in range(first, min(first + size, 24)):
            weight = replies[node].content["metrics"]["num-examples"]
            block_sum += replies[node].content["arrays"]["w"].numpy() * float(weight)
            weights += weight
        total += block_sum
    assert averaged is not None and averaged["w"].numpy().tobytes() == (total / weights).tobytes()
    one_sum = RunningMean()
    for reply in replies.values():
        one_sum.add(reply.content["arrays"], reply.content["metrics"]["num-examples"], "")
    assert one_sum.finish()["w"].numpy().tobytes() != averaged["w"].numpy().tobytes(), (
        "blocks change the bits"
    )


def test_values_that_are_not_finite_stay_so_even_at_weight_0() -> None:
    replies = [reply_of(1, content_of({"w": [np.inf, 0.0, np.nan]}, {"num-examples": 0}))]
    replies.append(reply_of(2, content_of({"w": [1.0, 1.0, 1.0]}, {"num-examples": 2})))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected, _ = FlowerFedAvg().aggregate_train(1, replies)
        averaged, _ = FedAvg().aggregate_train(1, iter(replies))
    assert np.array_equal(averaged["w"].numpy(), expected["w"].numpy(), equal_nan=True)
