"""Memory sizes as users write them, and the amount of GPU that a call requests."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flower_gpu.calls.settings import call_settings
from flower_gpu.errors import ConfigError
from flower_gpu.kinds import SIZE
from flower_gpu.leases.lease import LeaseRequest
from flower_gpu.printable import format_bytes

GIB = 1 << 30

SIZES = [
    (2_000_000_000, 2_000_000_000),
    (2e9, 2_000_000_000),
    (1.5, 2),  # fractions of a byte are rounded up
    (np.int64(5), 5),
    ("2GiB", 2 * GIB),
    (" 2GIB ", 2 * GIB),
    ("1.5 GB", 1_500_000_000),
    ("1.5GiB", 3 * GIB // 2),
    ("512MiB", 512 << 20),
    ("3kB", 3000),
    ("0.5TB", 5 * 10**11),
    ("700", 700),
    ("2_000_000_000", 2_000_000_000),
    ("2e9", 2_000_000_000),
    ("0.3 kB", 300),  # exact, although 0.3 * 1000 is not
]


@pytest.mark.parametrize(("value", "size"), SIZES)
def test_valid_sizes(value: Any, size: int) -> None:
    checked = SIZE.check(value, "gpu_memory")
    assert checked == size
    assert type(checked) is int


INVALID_SIZES: list[tuple[type[Exception], str, list[Any]]] = [
    (ConfigError, "is not a memory size", ["", "GiB", "2 Gi", "2,5 GB", "2 G iB", "nan", "9" * 5000]),
    # The first text has a digit of another script.
    (ConfigError, "is not a memory size", ["\u0663 GiB", math.nan]),
    (ConfigError, "must be more than 0 bytes", [0, "0 GiB", -1]),
    (ConfigError, "which no GPU has", [2**60, "2000 TiB", 10**400]),
    (TypeError, "must be a number of bytes or a text", [True, False, None, [1], b"2GiB", 1j]),
]


@pytest.mark.parametrize(
    ("kind", "reason", "value"),
    [(kind, reason, value) for kind, reason, values in INVALID_SIZES for value in values],
    ids=lambda value: str(value)[:30],
)
def test_invalid_sizes_are_refused(kind: type[Exception], reason: str, value: Any) -> None:
    with pytest.raises(kind, match=rf"^FLOWER_GPU_MEMORY.*{reason}"):
        SIZE.check(value, "FLOWER_GPU_MEMORY")


@given(st.text(max_size=12) | st.text("0123456789.eE+-_ kKmMgGtTiIbB", max_size=12))
def test_any_text_is_a_size_or_a_config_error(text: str) -> None:
    try:
        assert SIZE.check(text, "gpu_memory") > 0
    except ConfigError as error:
        assert str(error).startswith("gpu_memory=")


def test_format_bytes() -> None:
    numbers = [0, 3, 1023, 1024, 512 << 20, (1 << 30) - 1, 2 * GIB, 5 * GIB // 2, 3 << 40, -2 * GIB]
    texts = "0 B, 3 B, 1023 B, 1 KiB, 512 MiB, 1.0 GiB, 2.0 GiB, 2.5 GiB, 3.0 TiB, -2.0 GiB"
    assert ", ".join(map(format_bytes, numbers)) == texts


# Requests.


def request_of(code: dict[str, Any], environ: dict[str, str] | None = None) -> LeaseRequest:
    return call_settings(code, base=environ or {}).gpu.request


REQUESTS = [
    # arguments in the code, count, share, description
    ({}, 1, None, "one GPU, as much of it as is needed (auto)"),
    ({"num_gpus": 0.25}, 1, 0.25, "0.25 of one GPU"),
    ({"num_gpus": 1 / 3}, 1, 1 / 3, "0.333 of one GPU"),
    ({"num_gpus": Fraction(1, 4)}, 1, 0.25, "0.25 of one GPU"),
    ({"num_gpus": np.float32(0.5)}, 1, 0.5, "0.5 of one GPU"),
    ({"num_gpus": 1}, 1, 1.0, "1 GPU"),
    ({"num_gpus": 0.1 + 0.2 + 0.7}, 1, 1.0, "1 GPU"),
    ({"num_gpus": 2}, 2, 1.0, "2 GPUs"),
    ({"gpu_memory": "2GiB"}, 1, None, "2.0 GiB of one GPU"),
]


@pytest.mark.parametrize(("arguments", "count", "share", "description"), REQUESTS)
def test_a_request_from_arguments(
    arguments: dict[str, Any], count: int, share: float | None, description: str
) -> None:
    request = request_of(arguments)
    assert (request.count, request.share, request.describe()) == (count, share, description)
    assert request.is_auto == (arguments == {})


INVALID_NUMBERS = [
    *((ConfigError, number) for number in (0, -1, -0.25, math.nan, math.inf, 10**400, 1.5, 2.25, 1.001)),
    *((TypeError, number) for number in (True, False, "abc", "0.25", [1], 1j)),
]


@pytest.mark.parametrize(("kind", "num_gpus"), INVALID_NUMBERS, ids=lambda value: str(value)[:9])
def test_an_invalid_number_of_gpus_is_refused(kind: type[Exception], num_gpus: Any) -> None:
    with pytest.raises(kind, match=r"^num_gpus must be a share of one GPU .* whole number of GPUs"):
        request_of({"num_gpus": num_gpus})


@given(st.floats() | st.integers())
def test_any_number_of_gpus_is_a_request_or_a_config_error(number: float) -> None:
    try:
        request = request_of({"num_gpus": number})
    except ConfigError:
        return
    assert request.share is not None and 0 < request.share <= 1
    assert request.count * request.share == pytest.approx(number)


def test_num_gpus_and_gpu_memory_at_the_same_place_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_gpus=1 and gpu_memory='2GiB' are both given"):
        request_of({"num_gpus": 1, "gpu_memory": "2GiB"})
    with pytest.raises(ConfigError, match="FLOWER_GPU_NUM_GPUS=1 and FLOWER_GPU_MEMORY=2GiB are both given"):
        request_of({}, {"FLOWER_GPU_NUM_GPUS": "1", "FLOWER_GPU_MEMORY": "2GiB"})


@pytest.mark.parametrize("gpu_memory", [4, "4", "512 kB"])
def test_a_size_of_a_few_bytes_is_refused_as_a_mistake(gpu_memory: Any) -> None:
    with pytest.raises(ConfigError, match='A number without a unit is bytes; for GiB write "4GiB"'):
        request_of({"gpu_memory": gpu_memory})
