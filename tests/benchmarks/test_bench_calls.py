"""Benchmarks of calls: isolation, gpu_mod and the trace, and options that are refused."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest

CALL_KEYS = ["call", "way", "weights_mb", "runs", "median_s", "min_s", "max_s"]

Figures = Callable[..., dict[str, Any]]

pytestmark = pytest.mark.timeout(480)


def test_isolation_measures_each_kind_of_call(figures: Figures) -> None:
    ways = ["in-process", "ours-forkserver"]
    rows = figures("isolation", "--quick", "--only", "calls", "--ways", ",".join(ways))["calls"]
    assert all(list(row) == CALL_KEYS for row in rows)
    for call in ("update", "return"):
        assert ways == [row["way"] for row in rows if row["call"] == call]
    for row in rows:
        assert (row["weights_mb"], row["runs"]) == (0.1, 1)
        assert 0 < row["min_s"] <= row["median_s"] <= row["max_s"]


def test_wrong_weights_are_an_error_instead_of_a_figure() -> None:
    from benchmarks.shared import weights

    arrays = weights.make(0.1)
    weights.check(arrays, 0.1, added=0)
    with pytest.raises(ValueError, match="array 0 has wrong values"):
        weights.check(arrays, 0.1, added=1)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("isolation", ["--sizes", "0.01"], "not between"),
        ("isolation", ["--ways", "article,magic"], "'magic' is not one of in-process"),
        ("isolation", ["--json", "/nowhere/file.json"], "its folder does not exist"),
        ("leases", ["--processes=0"], "benchmarks.leases: argument"),
        ("simulation", ["--engines", "spark"], "'spark' is not one of ours, ray, loop"),
    ],
)
def test_invalid_options_are_refused(
    run_refused: Callable[..., tuple[int, str]], name: str, options: list[str], message: str
) -> None:
    status, stderr = run_refused(name, *options)
    assert status == 2
    assert message in stderr


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
def test_mod_compares_messages_with_and_without_it(figures: Figures) -> None:
    [row] = figures("mod", "--quick")["ray"]
    assert (row["weights_mb"], row["clients"], row["rounds"], row["actors"]) == (0.1, 2, 1, 1)
    assert row["without_s"] > 0 and row["with_min_s"] <= row["with_s"] <= row["with_max_s"]
    assert row["added_s"] == pytest.approx(row["with_s"] - row["without_s"], abs=1e-5)
    assert row["ratio"] == pytest.approx(row["with_s"] / row["without_s"], rel=0.1, abs=0.01)


def test_tracing_compares_with_and_without(figures: Figures) -> None:
    [row] = figures("tracing", "--quick", "--only", "no-op")["rows"]
    # Each worker writes four lines: its start, the start of the task, the result and its end. The run writes
    # six.
    assert (row["part"], row["clients"], row["on_lines"]) == ("no-op", 4, 4 * 4 + 6)
    assert row["on_s"] > 0 and row["off_s"] > 0 and row["line_us"] > 0
