"""How `flower-gpu top` draws a snapshot, for terminals of any size."""

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
from top_snapshots import HOST, RUN, WAITING, WORKER, gpu, hosts, on_cluster, snapshot, waiting, workers

from flower_gpu.watch.top.snapshot import Snapshot
from flower_gpu.watch.top.tables import divided
from flower_gpu.watch.top.view import Frame

PAGE = Path(__file__).parents[2] / "docs/reference/top.md"
SIZES = [(80, 24), (200, 50)]
SECTIONS = ["flower-gpu top", "GPU 0", "Runs", "Workers", "Waiting"]

#: What others may have written: anything, and what a terminal obeys more often than by chance.
OBEYED = st.sampled_from("\x1b[2J\x9b\x07\r\n\t\u202e\u200b\u0301\U0001f600個")
NASTY = st.text(st.one_of(st.characters(), OBEYED), max_size=30)


def drawn(shown: Snapshot, width: int, height: int | None, *, encoding: str = "utf-8", **more: str) -> str:
    """Return what a terminal is given, with its lines checked for their number and width."""
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="replace")
    size = {"width": width, "height": height or 24}
    console = Console(file=file, force_terminal=True, color_system="standard", **size)  # type: ignore[arg-type]
    console.print(Frame(shown, has_screen=height is not None, **more), crop=True)
    file.seek(0)
    return file.read()


def texts(shown: Snapshot, width: int, height: int | None, **more: str) -> list[str]:
    """Return the lines without their styles; what is left of others' escape sequences is not one."""
    lines = [re.sub(r"\x1b\[[\d;]*m", "", line) for line in drawn(shown, width, height, **more).split("\n")]
    assert lines.pop() == ""
    assert height is None or len(lines) <= height or height < 8
    assert all(cell_len(line) <= width for line in lines)
    return [line.rstrip() for line in lines]


@pytest.mark.parametrize("height", [24, None])
def test_the_frame_is_that_of_the_documentation(height: int | None) -> None:
    (shown,) = re.findall(r"```text\n(flower-gpu top .*?)```", PAGE.read_text(), re.DOTALL)
    first, *lines = texts(snapshot(), 80, height, keys="q quits")
    documented_first, *documented = shown.splitlines()
    assert re.sub(r"\d\d:\d\d:\d\d", "12:00:00", first) == documented_first
    # As many lines as there are: the rest is there without empty ones.
    assert [line for line in lines if line] == documented


def test_hosts_are_those_of_the_documentation() -> None:
    (documented,) = re.findall(r"```text\n(Runs .*?\nHosts .*?)```", PAGE.read_text(), re.DOTALL)
    shown = texts(on_cluster(), 80, 24)
    assert shown[shown.index("Runs  1") : -1] == documented.splitlines()


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_many_hosts_leave_room_for_workers(width: int, height: int) -> None:
    full = replace(on_cluster(), hosts=hosts(40), workers=workers(300), waiting=waiting(300))
    shown = texts(full, width, height)
    assert len(shown) == height
    assert "Hosts  40, 8 lost; memory in GiB" in shown
    of_hosts = sum(bool(re.match(r"  node\d", line)) for line in shown)
    of_workers = sum(bool(re.match(r"  quickstart +\d+ +fit", line)) for line in shown)
    assert 2 <= of_hosts <= of_workers
    assert f"  ... {40 - of_hosts} more" in shown
    # Without others that need them, hosts get all lines.
    shown = texts(replace(on_cluster(), hosts=hosts(15), workers=()), 80, 40)
    assert sum(bool(re.match(r"  node\d", line)) for line in shown) == 15


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_all_sections_are_there_however_much_there_is(width: int, height: int) -> None:
    full = snapshot(
        gpus=tuple(gpu(index) for index in range(8)),
        runs=(replace(RUN, run="first"),) * 9,
        workers=workers(300),
        waiting=waiting(300),
    )
    shown = texts(full, width, height)
    assert len(shown) == height
    for section in SECTIONS:
        assert sum(line.startswith(section) for line in shown) == 1, section
    # What is left out is counted.
    left_out = [int(found) for found in re.findall(r"\.\.\. (\d+) more", "\n".join(shown))]
    of_workers = sum(bool(re.match(r"  quickstart +\d+ +fit", line)) for line in shown)
    of_waiting = sum(bool(re.match(r" +\d+\.", line)) for line in shown)
    assert 1 <= of_waiting <= of_workers
    assert {300 - of_workers, 300 - of_waiting} <= set(left_out)


@settings(max_examples=40)
@given(
    st.integers(1, 250),
    st.one_of(st.none(), st.integers(1, 60)),
    st.integers(0, 10),
    st.integers(0, 40),
    st.integers(0, 40),
    st.integers(0, 12),
)
def test_nothing_is_wider_or_higher_than_the_terminal(
    width: int, height: int | None, gpus: int, working: int, queued: int, on_hosts: int
) -> None:
    shown = snapshot(
        gpus=tuple(gpu(index) for index in range(gpus)),
        gpu_problem="no driver " * 20,
        workers=workers(working),
        waiting=waiting(queued),
        hosts=hosts(on_hosts),
    )
    least = 10 if on_hosts else 1  # titles, and a line of each part
    assert texts(shown, width, None if height is None else max(least, height), keys="q quits")


@settings(max_examples=40)
@given(st.integers(20, 120), NASTY, NASTY, NASTY)
def test_no_text_of_others_can_command_the_terminal(width: int, name: str, client: str, told: str) -> None:
    worker = replace(WORKER, run=name, host=told, client=client, task=told, progress=told)
    shown = snapshot(
        runs=(replace(RUN, run=name, kind=told, folder=told, task=told, metrics={told: 1.0}),),
        workers=(worker, replace(worker, run="", client="", label=told, user=name)),
        waiting=(replace(WAITING, label=told, run=name, user=client), WAITING),
        gpus=(replace(gpu(), name=told), replace(gpu(1), problem=told)),
        hosts=(replace(HOST, host=name, lost=told), replace(HOST, run=name, host=told)),
        gpu_problem=told,
        ledger_problem=told,
        host=name,
    )
    assert all(line.isprintable() for line in texts(shown, width, 24))


def test_another_accounts_leases_are_named_by_the_account_only() -> None:
    secret = replace(WORKER, run="", client="", label="secret", user="alice", phase="held")
    shown = snapshot(workers=(secret,), waiting=(replace(WAITING, user="alice", label="secret"),))
    text = "\n".join(texts(shown, 200, 50))
    assert "secret" not in text
    assert text.count("user alice") == 2


def test_what_leases_there_are_is_not_known() -> None:
    broken = replace(gpu(), capacity_bytes=None, own_leased_bytes=0, other_leased_bytes=0)
    shown = texts(snapshot(gpus=(broken,), ledger_problem="it has been locked for 1 s"), 80, 24)
    assert shown[1] == "leases: it has been locked for 1 s"
    assert any("leased ? of ? GiB" in line for line in shown)


def test_a_lost_gpu_tells_why() -> None:
    lost = replace(gpu(1), name="", total_bytes=None, problem="it is lost: see dmesg")
    text = "\n".join(texts(snapshot(gpus=(gpu(), lost)), 80, 40))
    assert "GPU 1  model unknown" in text
    assert "it is lost: see dmesg" in text


def test_a_terminal_without_unicode_gets_none() -> None:
    text = "\n".join(texts(snapshot(workers=workers(300)), 60, 24, encoding="ascii"))
    assert text.isascii()


def test_who_uses_more_than_its_lease_stands_out() -> None:
    shown = drawn(snapshot(workers=(replace(WORKER, used_bytes=5 * GIB),)), 80, 24)
    assert re.search(r"\x1b\[31m *5\.0", shown)


@settings(max_examples=40)
@given(st.integers(0, 100), st.lists(st.integers(0, 2**40), min_size=1, max_size=6), st.integers(1, 2**40))
def test_a_bar_is_divided_as_memory_is(cells: int, parts: list[int], total: int) -> None:
    lengths = divided(cells, parts, total)
    whole = max(total, sum(parts))
    assert sum(lengths) <= cells
    assert all(length >= 0 for length in lengths)
    for part, length in zip(parts, lengths, strict=True):
        assert part > 0 or length == 0
        # One cell off by rounding, and one for each part that is made visible at the others' cost.
        assert abs(length - cells * part / whole) <= 1 + len(parts)
