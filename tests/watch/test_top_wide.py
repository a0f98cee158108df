"""The graphs of `flower-gpu top` on a wide terminal, and what they are drawn from."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nvml_stub import GIB
from rich.cells import cell_len
from rich.console import Console
from top_snapshots import RESOURCES, RUN, SIMULATION, gpu, snapshot, waiting, workers

from flower_gpu.watch.top import wide
from flower_gpu.watch.top.past import CORES, Past, graph
from flower_gpu.watch.top.snapshot import Snapshot
from flower_gpu.watch.top.view import Frame
from flower_gpu.watch.top.watcher import Watcher

PAGE = Path(__file__).parents[2] / "docs/reference/top.md"


def at(time: float, used: int | None, busy: int | None, **changes: object) -> Snapshot:
    """Return what is seen at a moment: bytes and percent of GPU 0."""
    seen = replace(gpu(), used_bytes=used, utilization_percent=busy)
    return snapshot(time=time, gpus=(seen,), resources=RESOURCES, **changes)


def rising(looks: int = 400) -> Past:
    """Return looks every half a second, with memory and use that rise and fall."""
    past = Past(0.5)
    for number in range(looks):
        part = abs(number % 100 - 50) / 50
        past.add(at(1000 + number / 2, int(16 * GIB * part), int(100 * (1 - part))))
    return past


def texts(shown: Snapshot, past: Past | None, width: int, height: int, encoding: str = "utf-8") -> list[str]:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="replace")
    console = Console(file=file, force_terminal=True, color_system=None, width=width, height=height)
    console.print(Frame(shown, "q quits", past=past), crop=True)
    file.seek(0)
    lines = file.read().split("\n")
    assert lines.pop() == "" and len(lines) <= height
    assert all(cell_len(line) <= width for line in lines)
    return [line.rstrip() for line in lines]


def test_a_wide_terminal_has_the_graphs_of_the_documentation() -> None:
    (documented,) = re.findall(r"```text\n(GPU 0 [^\n]+│.*?)```", PAGE.read_text(), re.DOTALL)
    lines = texts(snapshot(resources=RESOURCES), rising(), 120, 40)
    assert lines[1 : lines.index("Runs  2") - 1] == [line.rstrip() for line in documented.splitlines()]
    (digits,) = [line for line in lines if line.startswith("  digits") and "round" in line]
    assert "train 40/100 done, 4 running, 2 waiting, 54 to come" in digits


CURVES = {"accuracy": [(1 + n, 0.1 + n * 0.775 / 11) for n in range(12)], "loss": [(1, 2.3), (12, 0.5)]}


def test_a_wide_terminal_has_curves_of_the_runs_that_have_metrics_of_two_rounds() -> None:
    (documented,) = re.findall(r"```text\n(  │ digits .*?)```", PAGE.read_text(), re.DOTALL)
    digits = replace(SIMULATION, curves=CURVES)
    runs = (digits, replace(digits, run="other"), RUN)
    lines = texts(snapshot(runs=runs[:1], resources=RESOURCES), rising(), 120, 30)
    at = 1 + next(place for place, line in enumerate(lines) if line.startswith("  digits  round"))
    assert "12:34 left" in lines[at - 1]
    assert lines[at : at + 4] == documented.splitlines()
    assert [line.split("  ")[0] for line in lines[at + 4 :]] == ["Workers", *[""] * 6, "Waiting", "", ""]
    # Two runs have room on a higher one, and one with a single round has no curve.
    lines = texts(snapshot(runs=runs, resources=RESOURCES), rising(), 160, 50)
    assert [name for line in lines for name in re.findall(r"^  │ (\w+)", line)] == ["digits", "other"]


@settings(max_examples=40)
@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=2, max_size=900), st.booleans())
def test_a_curve_goes_from_its_least_to_its_most(values: list[float], is_ascii: bool) -> None:
    run = replace(RUN, curves={"loss": list(enumerate(values))})
    title, *drawn = [line.plain for line in wide.curves([run], 200, 30, is_ascii=is_ascii)]
    assert all(cell_len(line) <= 200 for line in (title, *drawn)) and len(drawn) == 3
    assert f"{values[-1]:.4g}" in title
    low = drawn[2].split("| " if is_ascii else "│ ")[1]
    assert len(low.rstrip()) == len(low), "each round has a dot at least"


@pytest.mark.parametrize(("width", "height"), [(80, 24), (119, 50), (160, 29), (60, 15)])
def test_a_smaller_terminal_is_as_it_is_without_a_past(width: int, height: int) -> None:
    shown = snapshot(resources=RESOURCES)
    assert texts(shown, rising(), width, height) == texts(shown, None, width, height)


@settings(max_examples=30, deadline=None)
@given(st.integers(100, 300), st.integers(20, 80), st.integers(0, 12), st.integers(0, 40), st.booleans())
def test_whatever_there_is_fits(width: int, height: int, gpus: int, working: int, has_cores: bool) -> None:
    shown = snapshot(
        gpus=tuple(replace(gpu(index), problem="lost" if index == 1 else None) for index in range(gpus)),
        gpu_problem="no driver " * 20,
        resources=RESOURCES if has_cores else None,
        runs=(replace(SIMULATION, curves=CURVES),) * (working % 5),
        workers=workers(working),
        waiting=waiting(working),
    )
    lines = texts(shown, rising(50), width, height)
    for title in ("Runs", "Workers", "Waiting"):
        assert sum(line.startswith(title) for line in lines) == 1


def test_without_unicode_the_graphs_are_plain() -> None:
    shown = texts(snapshot(resources=RESOURCES), rising(), 160, 50, "ascii")
    assert all(line.isascii() for line in shown)
    assert any(re.search(r"\|[ .:#]*#{3}", line) for line in shown)


def test_a_dot_is_the_most_memory_and_the_mean_use_of_its_looks() -> None:
    past = Past(0.5)
    for time, used, busy in ((10.0, 4, 0), (11.5, 8, 50), (12.0, None, None), (16.1, 16, 100)):
        past.add(at(time, None if used is None else used * GIB, busy))
    # Slots of two seconds: nothing was seen from 14 to 16, and at 12 the driver did not tell.
    assert past.memory("GPU-0", 5) == [None, 0.5, None, None, 1.0]
    assert past.busy("GPU-0", 5) == [None, 0.25, None, None, 1.0]
    assert past.memory(CORES, 3) == [0.75, None, 0.75]
    assert past.busy(CORES, 1) == [0.5]
    assert past.memory("GPU-7", 2) == [None, None]
    assert Past(60).slot_s == 120, "each dot has at least one look"


def test_a_long_view_takes_no_more_and_more_memory() -> None:
    past = Past(0.5)
    for number in range(3000):
        past.add(at(2.0 * number, GIB, 1))
    assert past.memory("GPU-0", 2000).count(None) == 2000 - 1024


@settings(max_examples=60)
@given(st.lists(st.tuples(*[st.one_of(st.none(), st.floats(0, 1))] * 2), max_size=30), st.integers(1, 5))
def test_a_graph_is_as_high_as_its_shares(pairs: list[tuple[float | None, float | None]], lines: int) -> None:
    shares = [share for pair in pairs for share in pair]
    drawn = graph(shares, lines, is_ascii=False)
    assert len(drawn) == lines and {len(line) for line in drawn} == {len(pairs)}
    for place, share in enumerate(shares):
        column = [line[place // 2] for line in drawn]
        bits = 0x47 if place % 2 == 0 else 0xB8
        dots = sum(((ord(letter) - 0x2800) & bits).bit_count() for letter in column if letter != " ")
        assert abs(dots - 4 * lines * (share or 0)) <= 1
        assert bool(dots) == bool(share)


def test_how_busy_the_cores_are_is_known_from_the_second_look_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLOWER_GPU_LEDGER_DIR", str(tmp_path))
    watcher = Watcher()
    looks = [watcher.take().resources]
    while len(looks) < 1000 and (len(looks) < 2 or looks[-1].cores_busy_percent is None):
        looks.append(watcher.take().resources)  # which keeps a core busy until there is a tick more
    watcher.close()
    assert looks[0].cores_busy_percent is None
    assert 0 < looks[-1].cores_busy_percent <= 100
