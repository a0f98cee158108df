"""Code may change the environment of a worker in any way without an error, but the fixed variables stay."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from unittest import mock

import pytest

from flower_gpu.calls import grants
from flower_gpu.calls.environment import fixed
from flower_gpu.leases.lease import Lease, Share

MERGED = "MERGED"


@pytest.fixture(autouse=True)
def _variables() -> Iterator[None]:
    """Set two fixed variables, a variable that is merged with new values, and a free variable."""

    def merged(text: str) -> str:
        return text if text.endswith(",ours") else f"{text},ours"

    original = dict(os.environ)
    os.environ.update({"FIXED": "ours", MERGED: "first,ours", "FREE": "1"})
    os.environ.pop("ABSENT", None)
    kind = type(os.environ)
    try:
        with fixed({"FIXED": lambda _: "ours", "ABSENT": lambda _: "", MERGED: merged}):
            yield
    finally:
        assert type(os.environ) is type(os.environb) is kind
        os.environ.clear()
        os.environ.update(original)


def is_kept() -> bool:
    """Return True if mappings, the C library and child programs all see the fixed variables."""
    program = "import os; print(os.environ.get('FIXED'), os.environ.get('MERGED', '').endswith('ours'))"
    process = subprocess.run(
        [sys.executable, "-S", "-c", program], capture_output=True, text=True, check=True
    )
    seen_here = os.environ["FIXED"], os.environb[b"FIXED"], os.environ[MERGED].endswith("ours")
    return seen_here == ("ours", b"ours", True) and process.stdout == "ours True\n"


def pop_all_items() -> None:
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


def bypass_the_mapping() -> None:
    os.putenv("FIXED", "theirs")
    os.putenv(b"FIXED", b"theirs")
    os.unsetenv("FIXED")


def patch_all() -> None:
    with mock.patch.dict(os.environ, {"FIXED": "theirs", "OWN": "1"}, clear=True):
        assert "FREE" not in os.environ and os.environ["OWN"] == "1"
        assert is_kept()
    assert os.environ["FREE"] == "1" and "OWN" not in os.environ


def clear() -> None:
    os.environ.clear()
    assert set(os.environ) == {"FIXED", MERGED}


@pytest.mark.parametrize(
    "change",
    [
        clear,
        pop_all_items,
        delete,
        update_in_place,
        set_bytes,
        bypass_the_mapping,
        patch_all,
        lambda: os.environ.pop("FIXED"),
        lambda: os.environ.pop("FIXED", None),
        lambda: os.environ.setdefault("FIXED", "theirs"),
        lambda: os.environ.update(FIXED="theirs"),
        lambda: copy.copy(os.environ).clear(),
        lambda: os.environ.copy().clear(),
    ],
)
def test_fixed_variables_stay(change: Callable[[], object]) -> None:
    change()
    assert is_kept()


def test_absent_variables_raise_the_usual_errors() -> None:
    assert os.environ.pop("ABSENT", "nothing") == "nothing"
    with pytest.raises(KeyError, match="ABSENT"):
        del os.environ["ABSENT"]
    with pytest.raises(TypeError):
        os.environ[1] = "1"  # type: ignore[index, assignment]


def test_copies_can_be_changed_freely() -> None:
    copied = os.environ.copy()
    copied["FIXED"] = "theirs"
    copied.pop(MERGED)
    assert (copied["FIXED"], {**os.environ, "FIXED": "theirs"}["FIXED"]) == ("theirs", "theirs")
    assert (os.environ | {"FIXED": "theirs"})["FIXED"] == "theirs"
    assert is_kept()


def test_a_refused_change_is_reported_once(capsys: pytest.CaptureFixture[str]) -> None:
    for value in ("theirs", "others"):
        os.environ["FIXED"] = value
    assert capsys.readouterr().err == (
        "flower-gpu: FIXED=theirs is ignored: this worker is limited to its lease, which has 'ours'\n"
    )


def test_nested_blocks_apply_the_rules_of_both() -> None:
    with fixed({"FREE": lambda _: "1"}):
        os.environ.update(FREE="2", FIXED="theirs")
        assert (os.environ["FREE"], is_kept()) == ("1", True)
    os.environ.update(FREE="2", FIXED="theirs")
    assert (os.environ["FREE"], is_kept()) == ("2", True)


GIB = 2**30
SHARES = tuple(Share(f"GPU-{number}", number, "A GPU", 16 * GIB, 5 * GIB, 4 * GIB) for number in range(2))


def test_a_worker_sees_the_gpus_of_its_lease_in_order() -> None:
    both = Lease("ab12", SHARES)
    variables = grants.of_lease(both, {})
    assert variables["CUDA_VISIBLE_DEVICES"] == "GPU-0,GPU-1"
    assert variables["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert Lease.from_environment(variables) == both
    assert float(variables["XLA_PYTHON_CLIENT_MEM_FRACTION"]) == 0.25


def test_a_worker_without_a_gpu_sees_no_gpu_and_no_lease() -> None:
    variables = grants.of_lease(None, {})
    assert variables["CUDA_VISIBLE_DEVICES"] == ""
    assert Lease.from_environment(variables) is None
