"""`flower-gpu top` draws snapshots for terminals of any size."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nvml_stub import GIB
from properties import examples
from rich.cells import cell_len
from top_snapshots import RESOURCES, RUN, WAITING, WORKER, gpu, snapshot, waiting, workers

from flower_gpu.watch.top.browsing import Browsing, keys_of
from flower_gpu.watch.top.lines import coloured
from flower_gpu.watch.top.snapshot import Snapshot
from flower_gpu.watch.top.view import Size, divided, draw

PAGE = Path(__file__).parents[3] / "docs/reference/top.md"
SIZES = [(80, 24), (200, 50)]
SECTIONS = ["flower-gpu top", "GPU 0", "Runs", "Workers", "Waiting"]

#: Texts of other accounts and apps may be anything. Escape sequences of terminals are more frequent here.
OBEYED = st.sampled_from("\x1b[2J\x9b\x07\r\n\t\u202e\u200b\u0301\U0001f600個")
NASTY = st.text(st.one_of(st.characters(), OBEYED), max_size=30)


def texts(
    shown: Snapshot,
    width: int,
    height: int | None,
    *,
    browsing: Browsing | None = None,
    is_ascii: bool = False,
) -> list[str]:
    """Return the drawn lines without their styles. They must fit the terminal."""
    lines = [line.plain for line in draw(shown, Size(width, height, is_ascii), browsing)]
    assert height is None or len(lines) <= height
    assert all(cell_len(line) <= width for line in lines)
    return [line.rstrip() for line in lines]


@pytest.mark.parametrize("height", [24, None])
def test_the_frame_matches_the_documentation(height: int | None) -> None:
    (shown,) = re.findall(r"```text\n(flower-gpu top .*?)```", PAGE.read_text(), re.DOTALL)
    first, *lines = texts(snapshot(resources=RESOURCES), 80, height, browsing=Browsing())
    documented_first, *documented = shown.splitlines()
    if height is None:  # the line with the keys is missing
        del documented[0]
    assert re.sub(r"\d\d:\d\d:\d\d", "12:00:00", first) == documented_first
    # Empty lines depend on the height, so only the other lines are compared.
    assert [line for line in lines if line] == documented


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_all_sections_are_shown_however_many_rows_there_are(width: int, height: int) -> None:
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
    # Rows without room are counted.
    worker_count = sum(bool(re.match(r"  quickstart +\d+ +fit", line)) for line in shown)
    waiting_count = sum(bool(re.match(r" +\d+\.", line)) for line in shown)
    assert 1 <= waiting_count <= worker_count
    assert any(line.startswith(f"Workers  1-{worker_count} of 300") for line in shown)
    assert f"  ... {300 - waiting_count} more" in shown


ARROWS = [b"\x1b[A", b"\x1bOB", b"\x1b[5~", b"\x1b[6~", b"\x1b[H", b"\x1b[F"]
KEYS = [b"\t", *ARROWS, b"<", b">", b"r", b"\x1b"]
LOOK = st.tuples(
    st.lists(st.sampled_from(KEYS), max_size=8),
    st.integers(1, 250),
    st.integers(1, 60),
    st.sampled_from([0, 1, 30, 1000]),
    st.integers(0, 30),
)


@settings(max_examples=examples(50))
@given(st.lists(LOOK, min_size=1, max_size=3), st.integers(0, 2000))
def test_any_keys_keep_the_window_within_the_rows_and_the_terminal(
    looks: list[tuple[list[bytes], int, int, int, int]], first: int
) -> None:
    browsing = Browsing()
    browsing.first = first
    for keys, width, height, working, queued in looks:
        for key in keys:
            browsing.press(key)
        shown = snapshot(
            gpus=tuple(gpu(index) for index in range(queued % 11)),
            gpu_problem="no driver " * 20,
            workers=workers(working),
            waiting=waiting(queued),
            resources=RESOURCES,
        )
        lines = "\n".join(texts(shown, width, height, browsing=browsing))
        count = {"Workers": working, "Waiting": queued}[browsing.table]
        if title := re.search(rf"^{browsing.table}  (\d+)-(\d+) of (\d+)( |$)", lines, re.MULTILINE):
            start, stop, total = map(int, title.groups()[:3])
            assert (start, total) == (browsing.first + 1, count) and start <= stop <= count
            assert stop - start < height
        elif width >= 40 and height >= 20:
            assert browsing.first == 0, "the table is scrolled although all rows have room"


def rows_of(shown: Snapshot, browsing: Browsing, pressed: bytes, height: int = 40) -> list[str]:
    for key in keys_of(pressed):
        browsing.press(key)
    return texts(shown, 100, height, browsing=browsing)


def test_tables_are_sorted_by_the_marked_column() -> None:
    clients = [("17", 3, GIB), ("3", 1, None), ("server", 2, 3 * GIB), ("21", None, 2 * GIB)]
    shown = snapshot(
        gpus=(),
        workers=tuple(
            replace(WORKER, client=client, round=round_, used_bytes=used, pid=None)
            for client, round_, used in clients
        ),
        waiting=(
            replace(WAITING, label="b", seconds=9.0),
            replace(WAITING, label="a", seconds=70.0),
            replace(WAITING, user="alice", label="", seconds=8.0),
        ),
    )
    browsing = Browsing()

    def workers_after(pressed: bytes) -> tuple[list[str], list[str]]:
        lines = rows_of(shown, browsing, pressed)
        heads = lines[1 + next(index for index, line in enumerate(lines) if line.startswith("Workers"))]
        clients_by_line = [re.findall(r"  quickstart +(\S+) +fit", line) for line in lines]
        return re.findall(r"\S+[▲▼]", heads), [client for line in clients_by_line for client in line]

    assert workers_after(b"") == ([], ["17", "3", "server", "21"])
    assert workers_after(b"r") == ([], ["21", "server", "3", "17"])
    assert workers_after(b">") == (["run▲"], ["17", "3", "server", "21"])
    assert workers_after(b".") == (["client▲"], ["3", "17", "21", "server"])
    assert workers_after(b"r") == (["client▼"], ["server", "21", "17", "3"])
    assert workers_after(b">") == (["round▼"], ["17", "server", "3", "21"])
    assert workers_after(b">>") == (["used▼"], ["server", "21", "17", "3"])
    assert workers_after(b"R") == (["used▲"], ["17", "21", "server", "3"]), "unknown values are not last"
    # A column without values is omitted. A narrow terminal keeps the column by which the table is sorted.
    assert workers_after(b">")[0] == ["age▼"]
    rows_of(shown, browsing, b"<<")
    assert not any("share▼" in line for line in texts(snapshot(), 40, 24, browsing=Browsing()))
    assert any("share▼" in line for line in texts(shown, 40, 24, browsing=browsing))
    # Waiting claims keep their numbers in the queue.
    lines = rows_of(shown, browsing, b"\t>", height=24)
    assert [line.split()[0] for line in lines[-3:]] == ["2.", "1.", "3."] and "for▲" in lines[-4]
    lines = rows_of(shown, browsing, b">>", height=24)
    assert [line.split()[0] for line in lines[-3:]] == ["2.", "1.", "3."] and "age▼" in lines[-4]


def test_a_long_table_scrolls_and_states_its_shown_rows() -> None:
    shown = snapshot(workers=workers(1000), waiting=waiting(30))
    browsing = Browsing()

    def rows_after(pressed: bytes) -> tuple[str, list[int]]:
        lines = rows_of(shown, browsing, pressed, height=24)
        (title,) = [line for line in lines if line.startswith("Workers")]
        return title, [
            int(client) for line in lines for client in re.findall(r"^  quickstart +(\d+) +fit", line)
        ]

    page = len(rows_after(b"")[1])
    assert page >= 5
    assert rows_after(b"\x1b[6~")[1][0] == page
    title, clients = rows_after(b"\x1b[H\x1b[B")
    assert title.startswith(f"Workers  2-{page + 1} of 1000") and clients == list(range(1, page + 1))
    assert rows_after(b"\x1b[6~\x1bOA")[1][0] == page
    assert rows_after(b"\x1b[F")[1] == list(range(1000 - page, 1000))
    assert rows_after(b"\x1b[B")[1][-1] == 999
    assert rows_after(b"\x1b[5~")[1][-1] == 999 - page
    # When the table shrinks, its last rows are shown.
    rows_after(b"\x1b[4~")
    shown = snapshot(workers=workers(500))
    assert rows_after(b"")[1][-1] == 499
    # Tab gives the lines to the other table, and this table returns to its beginning.
    shown = snapshot(workers=workers(1000), waiting=waiting(30))
    assert 1 <= len(rows_after(b"\t")[1]) < page
    assert any(line.startswith("Waiting  1-") for line in rows_of(shown, browsing, b"", height=24))
    assert rows_after(b"\t\x1b[1~")[1][0] == 0


@settings(max_examples=examples(40))
@given(st.integers(20, 120), NASTY, NASTY, NASTY)
def test_no_text_contains_terminal_commands(width: int, name: str, client: str, text: str) -> None:
    worker = replace(WORKER, run=name, host=text, client=client, task=text, progress=text)
    shown = snapshot(
        runs=(replace(RUN, run=name, kind=text, folder=text, task=text, metrics={text: 1.0}),),
        workers=(worker, replace(worker, run="", client="", label=text, user=name)),
        waiting=(replace(WAITING, label=text, run=name, user=client), WAITING),
        gpus=(replace(gpu(), name=text), replace(gpu(1), problem=text)),
        gpu_problem=text,
        ledger_problem=text,
        host=name,
    )
    assert all(line.isprintable() for line in texts(shown, width, 24))


def test_leases_of_another_account_show_only_the_account() -> None:
    secret = replace(WORKER, run="", client="", label="secret", user="alice", phase="held")
    shown = snapshot(workers=(secret,), waiting=(replace(WAITING, user="alice", label="secret"),))
    text = "\n".join(texts(shown, 200, 50))
    assert "secret" not in text
    assert text.count("user alice") == 2


def test_unknown_values_and_a_lost_gpu_are_shown() -> None:
    broken = replace(gpu(), capacity_bytes=None, own_leased_bytes=0, other_leased_bytes=0)
    lost = replace(gpu(1), name="", total_bytes=None, problem="it is lost: see dmesg")
    shown = texts(snapshot(gpus=(broken, lost), ledger_problem="it has been locked for 1 s"), 80, 40)
    assert shown[1] == "leases: it has been locked for 1 s"
    assert any("leased ? of ?" in line for line in shown)
    assert "GPU 1 model unknown: it is lost: see dmesg" in "\n".join(shown)


def test_a_terminal_without_unicode_gets_ascii_only() -> None:
    text = "\n".join(texts(snapshot(workers=workers(300)), 150, 24, is_ascii=True))
    assert text.isascii()


def test_a_worker_that_uses_more_than_its_lease_is_highlighted() -> None:
    lines = draw(snapshot(workers=(replace(WORKER, used_bytes=5 * GIB),)), Size(80, 24))
    assert any("\x1b[31m5.0\x1b[0m" in coloured(line) for line in lines)


@settings(max_examples=examples(40))
@given(st.integers(0, 100), st.lists(st.integers(0, 2**40), min_size=1, max_size=6), st.integers(1, 2**40))
def test_a_bar_is_divided_in_proportion_to_memory(cells: int, parts: list[int], total: int) -> None:
    lengths = divided(cells, parts, total)
    whole_number = max(total, sum(parts))
    assert sum(lengths) <= cells
    assert all(length >= 0 for length in lengths)
    for part, length in zip(parts, lengths, strict=True):
        assert part > 0 or length == 0
        # A length is off by one cell from rounding, and by one for each part that is made visible.
        assert abs(length - cells * part / whole_number) <= 1 + len(parts)
