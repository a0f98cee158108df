"""Whatever code does with the environment of a worker, it returns, and the fixed variables stay."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from unittest import mock

import pytest

from flower_gpu.calls import environment
from flower_gpu.calls.environment import fixed
from flower_gpu.leases.lease import Lease, Share

MERGED = "MERGED"


@pytest.fixture(autouse=True)
def _variables() -> Iterator[None]:
    """Have two fixed variables, one that others are put together with, and one that is free."""

    def merged(text: str) -> str:
        return text if text.endswith(",ours") else f"{text},ours"

    before = dict(os.environ)
    os.environ.update({"FIXED": "ours", MERGED: "first,ours", "FREE": "1"})
    os.environ.pop("ABSENT", None)
    kind = type(os.environ)
    try:
        with fixed({"FIXED": lambda _: "ours", "ABSENT": lambda _: "", MERGED: merged}):
            yield
    finally:
        assert type(os.environ) is type(os.environb) is kind
        os.environ.clear()
        os.environ.update(before)


def kept() -> bool:
    """Whether all who read the environment find what is fixed: mappings, the C library, programs."""
    program = "import os; print(os.environ.get('FIXED'), os.environ.get('MERGED', '').endswith('ours'))"
    done = subprocess.run([sys.executable, "-S", "-c", program], capture_output=True, text=True, check=True)
    here = os.environ["FIXED"], os.environb[b"FIXED"], os.environ[MERGED].endswith("ours")
    return here == ("ours", b"ours", True) and done.stdout == "ours True\n"


def empty() -> None:
    with pytest.raises(KeyError):
        while True:
            os.environ.popitem()


def delete() -> None:
    del os.environ["FIXED"]


def update_in_place() -> None:
    os.environ |= {"FIXED": "theirs", MERGED: "second", "FREE": "2"}
    assert (os.environ[MERGED], os.environ["FREE"]) == ("second,ours", "2")


def set_bytes() -> None:
    os.environb[b"FIXED"] = b"theirs"
    os.environb.clear()


def past_the_mapping() -> None:
    os.putenv("FIXED", "theirs")
    os.putenv(b"FIXED", b"theirs")
    os.unsetenv("FIXED")


def patch_all() -> None:
    with mock.patch.dict(os.environ, {"FIXED": "theirs", "OWN": "1"}, clear=True):
        assert "FREE" not in os.environ and os.environ["OWN"] == "1"
        assert kept()
    assert os.environ["FREE"] == "1" and "OWN" not in os.environ


def clear() -> None:
    os.environ.clear()
    assert set(os.environ) == {"FIXED", MERGED}


@pytest.mark.parametrize(
    "change",
    [
        clear,
        empty,
        delete,
        update_in_place,
        set_bytes,
        past_the_mapping,
        patch_all,
        lambda: os.environ.pop("FIXED"),
        lambda: os.environ.pop("FIXED", None),
        lambda: os.environ.setdefault("FIXED", "theirs"),
        lambda: os.environ.update(FIXED="theirs"),
        lambda: copy.copy(os.environ).clear(),
        lambda: os.environ.copy().clear(),
    ],
)
def test_what_is_fixed_stays(change: Callable[[], object]) -> None:
    change()
    assert kept()


def test_what_is_not_there_is_missing() -> None:
    assert os.environ.pop("ABSENT", "nothing") == "nothing"
    with pytest.raises(KeyError, match="ABSENT"):
        del os.environ["ABSENT"]
    with pytest.raises(TypeError):
        os.environ[1] = "1"  # type: ignore[index, assignment]


def test_copies_are_free() -> None:
    own = os.environ.copy()
    own["FIXED"] = "theirs"
    own.pop(MERGED)
    assert (own["FIXED"], {**os.environ, "FIXED": "theirs"}["FIXED"]) == ("theirs", "theirs")
    assert (os.environ | {"FIXED": "theirs"})["FIXED"] == "theirs"
    assert kept()


def test_it_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    for value in ("theirs", "others"):
        os.environ["FIXED"] = value
    assert capsys.readouterr().err == (
        "flower-gpu: FIXED=theirs is not used: this worker keeps to its lease, which has 'ours'\n"
    )


def test_a_block_within_another_one_has_the_rules_of_both() -> None:
    with fixed({"FREE": lambda _: "1"}):
        os.environ.update(FREE="2", FIXED="theirs")
        assert (os.environ["FREE"], kept()) == ("1", True)
    os.environ.update(FREE="2", FIXED="theirs")
    assert (os.environ["FREE"], kept()) == ("2", True)


GIB = 2**30
SHARES = tuple(Share(f"GPU-{number}", number, "A GPU", 16 * GIB, 5 * GIB, 4 * GIB) for number in range(2))


def test_a_worker_sees_the_gpus_of_its_lease_in_order_and_can_read_it() -> None:
    both = Lease("ab12", SHARES)
    variables = environment.of_worker(both, {})
    assert variables["CUDA_VISIBLE_DEVICES"] == "GPU-0,GPU-1"
    assert variables["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert Lease.from_environment(variables) == both
    assert float(variables["XLA_PYTHON_CLIENT_MEM_FRACTION"]) == 0.25


def test_a_worker_without_gpu_sees_none_and_has_no_lease() -> None:
    variables = environment.of_worker(None, {})
    assert variables["CUDA_VISIBLE_DEVICES"] == ""
    assert Lease.from_environment(variables) is None
