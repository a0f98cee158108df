"""The table of a run's metrics: it grows by rows, and is whole again after whatever happened to it."""

from __future__ import annotations

import csv
import os
import resource
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from flower_gpu import trace
from flower_gpu.apps.folder import RunFolder
from flower_gpu.watch.history import History
from flower_gpu.watch.metrics_table import MetricsTable
from flower_gpu.watch.spans import RoundPart


class Rounds:
    """A run whose rounds are over one after the other, with a table that is extended after each."""

    def __init__(self, folder: RunFolder, history: History | None = None) -> None:
        self.history = history or History(keep_finished=False, keep_rounds=True)
        self.table = MetricsTable(folder)

    def finish(self, number: int | None, task: str = "train", **metrics: Any) -> None:
        told = {"round": number, "task": task, "messages": 1, "failed": 0, "metrics": metrics}
        self.history.feed([trace.make("round_finished", **told)])
        part = self.history.part(number, task)
        assert part is not None
        self.table.note(part)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path)


def rows(folder: RunFolder) -> list[list[str]]:
    with folder.metrics.open(newline="") as file:
        return list(csv.reader(file))


def test_a_round_appends_its_rows_and_nothing_else(folder: RunFolder) -> None:
    rounds = Rounds(folder)
    rounds.finish(1, loss=0.5)
    rounds.finish(1, "evaluate", accuracy=0.25)
    rounds.table.extend(rounds.history)
    with folder.metrics.open("rb") as opened:
        for number in range(2, 200):
            before = folder.metrics.read_bytes()
            rounds.finish(number, loss=0.5 / number)
            rounds.finish(number, "evaluate", accuracy=None)
            rounds.table.extend(rounds.history)
            assert folder.metrics.read_bytes().startswith(before)
        rounds.table.extend(rounds.history)
        # The number of the inode would not show that: a new file may have the number of a removed one.
        assert opened.read() == folder.metrics.read_bytes(), "it is the same file, which grew"
    found = rows(folder)
    assert found[:3] == [
        ["round", "kind", "loss", "accuracy"],
        ["1", "train", "0.5", ""],
        ["1", "evaluate", "", "0.25"],
    ]
    assert found[-1] == ["199", "evaluate", "", "nan"] and len(found) == 1 + 2 * 199
    written = folder.metrics.read_bytes()
    rounds.table.write(rounds.history.rounds)
    assert folder.metrics.read_bytes() == written, "the same table is written at the end of the run"


class CountingHistory(History):
    """Counts the parts at which others look."""

    parts_seen = 0

    @property
    def rounds(self) -> list[RoundPart]:
        found = super().rounds
        self.parts_seen += len(found)
        return found

    def newest_parts(self) -> Iterator[RoundPart]:
        for part in super().newest_parts():
            self.parts_seen += 1
            yield part


def test_a_round_looks_at_its_own_rows_only(folder: RunFolder) -> None:
    """Its cost does not grow with the number of rounds before it."""
    history = CountingHistory(keep_finished=False, keep_rounds=True)
    rounds = Rounds(folder, history)
    seen = []
    for number in range(1, 100):
        rounds.finish(number, loss=0.5)
        rounds.finish(number, "evaluate", loss=0.25)
        rounds.table.extend(history)
        seen.append(history.parts_seen)
    assert {after - before for before, after in pairwise(seen)} == {3}, "two new parts, and the last one"


def test_a_full_disk_leaves_no_half_row(folder: RunFolder) -> None:
    """A limit on the size of files takes its place."""
    rounds = Rounds(folder)
    rounds.finish(1, loss=0.5)
    rounds.table.extend(rounds.history)
    before = folder.metrics.read_bytes()
    rounds.finish(2, loss=0.125)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 5, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            rounds.table.extend(rounds.history)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert folder.metrics.read_bytes() == before
    rounds.table.extend(rounds.history)
    assert rows(folder)[1:] == [["1", "train", "0.5"], ["2", "train", "0.125"]]


def test_a_new_metric_gets_a_column(folder: RunFolder) -> None:
    rounds = Rounds(folder)
    for number in (1, 2):
        rounds.finish(number, loss=0.5)
        rounds.table.extend(rounds.history)
    rounds.finish(3, loss=0.25, f1=1.0)
    rounds.table.extend(rounds.history)
    rounds.finish(4, f1=0.5, round=7)
    rounds.table.extend(rounds.history)
    assert rows(folder) == [
        ["round", "kind", "loss", "f1", "round (metric)"],
        ["1", "train", "0.5", "", ""],
        ["2", "train", "0.5", "", ""],
        ["3", "train", "0.25", "1.0", ""],
        ["4", "train", "", "0.5", "7"],
    ]


def test_metrics_that_are_told_later_change_their_row(folder: RunFolder) -> None:
    rounds = Rounds(folder)
    for number in (1, 2):
        rounds.finish(number, loss=0.5)
        rounds.finish(None, "query", count=number)
        rounds.table.extend(rounds.history)
    rounds.finish(1, loss=0.75)
    rounds.table.extend(rounds.history)
    assert rows(folder)[1:] == [["1", "train", "0.75", ""], ["", "query", "", "2"], ["2", "train", "0.5", ""]]


@pytest.mark.parametrize("left", [b"", b"round,ki", b"round,kind,loss\n1,train,0.5\n2,tra", None])
def test_a_run_that_goes_on_has_each_round_once_whatever_the_killed_one_left(
    folder: RunFolder, left: bytes | None
) -> None:
    """Rounds after the checkpoint are done again."""
    before = Rounds(folder)
    for number in (1, 2, 3):
        before.finish(number, loss=float(number))
        before.table.extend(before.history)
    if left is not None:
        folder.metrics.write_bytes(left)
    before.history.feed([trace.make("strategy_resumed", round=2)])
    again = Rounds(folder, before.history)
    for number in (3, 4):
        again.finish(number, loss=10.0 * number)
        again.table.extend(again.history)
    assert rows(folder)[1:] == [
        ["1", "train", "1.0"],
        ["2", "train", "2.0"],
        ["3", "train", "30.0"],
        ["4", "train", "40.0"],
    ]


def test_a_table_that_somebody_has_changed_is_written_anew(folder: RunFolder) -> None:
    rounds = Rounds(folder)
    rounds.finish(1, loss=0.5)
    rounds.table.extend(rounds.history)
    for change in (lambda: folder.metrics.unlink(), lambda: os.truncate(folder.metrics, 3)):
        change()
        number = len(rounds.history.rounds) + 1
        rounds.finish(number, loss=0.5)
        rounds.table.extend(rounds.history)
        assert [row[0] for row in rows(folder)] == ["round", *map(str, range(1, number + 1))]


def test_odd_texts_stay_in_their_cells(folder: RunFolder) -> None:
    rounds = Rounds(folder)
    texts = ["a\rb", "c\nd", 'e"f', "g,h", "\udcff"]
    rounds.finish(0, note="")
    for number, text in enumerate(texts, 1):
        rounds.finish(number, note=text)
        rounds.table.extend(rounds.history)
    assert [row[2] for row in rows(folder)[2:]] == [*texts[:-1], "?"]
