"""The table of a run's metrics: rows are appended, and a damaged table is written again as a whole."""

from __future__ import annotations

import csv
import os
import resource
from collections.abc import Callable, Iterable, Iterator
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from flower_gpu import trace
from flower_gpu.apps.folder import RunFolder
from flower_gpu.watch.display import RoundLines, TerminalBars
from flower_gpu.watch.folds.rounds import RoundFold, RoundPart
from flower_gpu.watch.history import History
from flower_gpu.watch.metrics_table import MetricsTable
from flower_gpu.watch.trackers.points import Points


class Rounds:
    """A run that finishes round after round, and its table."""

    def __init__(self, folder: RunFolder) -> None:
        self.history = History(keep_finished=False, keep_rounds=True)
        self.table = MetricsTable(folder)

    def finish(self, number: int | None, task: str = "train", **metrics: Any) -> None:
        fields = {"round": number, "task": task, "messages": 1, "failed": 0, "metrics": metrics}
        self.history.feed([trace.make("round_finished", **fields)])
        part = self.history.rounds.part(number, task)
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
    rounds.table.extend(rounds.history.rounds)
    with folder.metrics.open("rb") as opened:
        for number in range(2, 200):
            previous_bytes = folder.metrics.read_bytes()
            rounds.finish(number, loss=0.5 / number)
            rounds.finish(number, "evaluate", accuracy=None)
            rounds.table.extend(rounds.history.rounds)
            assert folder.metrics.read_bytes().startswith(previous_bytes)
        rounds.table.extend(rounds.history.rounds)
        # Inode numbers would not prove that, because a new file may reuse the number of a removed one.
        assert opened.read() == folder.metrics.read_bytes(), "the file was replaced instead of extended"
    table_rows = rows(folder)
    assert table_rows[:3] == [
        ["round", "kind", "loss", "accuracy"],
        ["1", "train", "0.5", ""],
        ["1", "evaluate", "", "0.25"],
    ]
    assert table_rows[-1] == ["199", "evaluate", "", "nan"] and len(table_rows) == 1 + 2 * 199
    written = folder.metrics.read_bytes()
    rounds.table.write(rounds.history.rounds.parts)
    assert folder.metrics.read_bytes() == written, "the table at the end of the run differs"


@pytest.fixture
def parts_read(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Count how many finished parts are read from histories, and return a function with the number."""
    count = 0

    def counted(parts: Iterable[RoundPart]) -> Iterator[RoundPart]:
        nonlocal count
        for part in parts:
            count += 1
            yield part

    newest_parts = RoundFold.newest_parts
    monkeypatch.setattr(RoundFold, "newest_parts", lambda fold: counted(newest_parts(fold)))
    for name in ("parts", "numbered_parts"):
        parts: Any = getattr(RoundFold, name).fget
        monkeypatch.setattr(RoundFold, name, property(lambda fold, parts=parts: list(counted(parts(fold)))))
    return lambda: count


def test_a_round_reads_only_its_new_parts(folder: RunFolder, parts_read: Callable[[], int]) -> None:
    """The cost of a round does not grow with the number of earlier rounds."""
    rounds = Rounds(folder)
    counts = []
    for number in range(1, 100):
        rounds.finish(number, loss=0.5)
        rounds.finish(number, "evaluate", loss=0.25)
        rounds.table.extend(rounds.history.rounds)
        counts.append(parts_read())
    # Each extension reads the two new parts and the last one before them.
    assert {after - previous for previous, after in pairwise(counts)} == {3}


def test_views_read_few_parts_for_an_event(parts_read: Callable[[], int]) -> None:
    """Displays and trackers do the same work for an event of the first round and of the last."""
    history = History(keep_finished=False)
    bars, lines, points = TerminalBars(history, StringIO()), RoundLines(history, StringIO()), Points(history)
    counts = []
    for number in range(100, 300):
        for name in ("round_started", "reply", "worker_finished", "round_finished"):
            event = trace.make(name, round=number, task="train", node=1, error=None, metrics={"loss": 0.5})
            history.feed([event])
            for display in (bars, lines):
                display.show(event)
            list(points.of(event))
        counts.append(parts_read())
    bars.close()
    used = [after - previous for previous, after in pairwise(counts)]
    # A history that does not keep all rounds looks at the 51 newest parts when a part is finished.
    assert max(used) <= 2 * 51 + 2
    assert used[-1] == used[100]
    before = parts_read()
    bars.close()
    assert parts_read() == before


def test_a_full_disk_leaves_no_partial_row(folder: RunFolder) -> None:
    """A limit on the size of files stands in for the full disk."""
    rounds = Rounds(folder)
    rounds.finish(1, loss=0.5)
    rounds.table.extend(rounds.history.rounds)
    intact = folder.metrics.read_bytes()
    rounds.finish(2, loss=0.125)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(intact) + 5, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            rounds.table.extend(rounds.history.rounds)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert folder.metrics.read_bytes() == intact
    rounds.table.extend(rounds.history.rounds)
    assert rows(folder)[1:] == [["1", "train", "0.5"], ["2", "train", "0.125"]]


def test_a_new_metric_gets_a_column(folder: RunFolder) -> None:
    rounds = Rounds(folder)
    for number in (1, 2):
        rounds.finish(number, loss=0.5)
        rounds.table.extend(rounds.history.rounds)
    rounds.finish(3, loss=0.25, f1=1.0)
    rounds.table.extend(rounds.history.rounds)
    rounds.finish(4, f1=0.5, round=7)
    rounds.table.extend(rounds.history.rounds)
    assert rows(folder) == [
        ["round", "kind", "loss", "f1", "round (metric)"],
        ["1", "train", "0.5", "", ""],
        ["2", "train", "0.5", "", ""],
        ["3", "train", "0.25", "1.0", ""],
        ["4", "train", "", "0.5", "7"],
    ]


def test_metrics_reported_later_change_their_row(folder: RunFolder) -> None:
    rounds = Rounds(folder)
    for number in (1, 2):
        rounds.finish(number, loss=0.5)
        rounds.finish(None, "query", count=number)
        rounds.table.extend(rounds.history.rounds)
    rounds.finish(1, loss=0.75)
    rounds.table.extend(rounds.history.rounds)
    assert rows(folder)[1:] == [["1", "train", "0.75", ""], ["", "query", "", "2"], ["2", "train", "0.5", ""]]


@pytest.mark.parametrize("leftover", [b"", b"round,ki", b"round,kind,loss\n1,train,0.5\n2,tra", None])
def test_a_resumed_run_has_each_round_once_whatever_the_killed_run_left(
    folder: RunFolder, leftover: bytes | None
) -> None:
    """A resumed run repeats the rounds after its checkpoint."""
    killed = Rounds(folder)
    for number in (1, 2, 3):
        killed.finish(number, loss=float(number))
        killed.table.extend(killed.history.rounds)
    if leftover is not None:
        folder.metrics.write_bytes(leftover)
    killed.history.feed([trace.make("strategy_resumed", round=2)])
    resumed = Rounds(folder)
    resumed.history = killed.history
    for number in (3, 4):
        resumed.finish(number, loss=10.0 * number)
        resumed.table.extend(resumed.history.rounds)
    assert rows(folder)[1:] == [
        ["1", "train", "1.0"],
        ["2", "train", "2.0"],
        ["3", "train", "30.0"],
        ["4", "train", "40.0"],
    ]


def test_a_table_changed_by_another_program_is_written_again(folder: RunFolder) -> None:
    rounds = Rounds(folder)
    rounds.finish(1, loss=0.5)
    rounds.table.extend(rounds.history.rounds)
    for change in (lambda: folder.metrics.unlink(), lambda: os.truncate(folder.metrics, 3)):
        change()
        number = len(rounds.history.rounds.parts) + 1
        rounds.finish(number, loss=0.5)
        rounds.table.extend(rounds.history.rounds)
        assert [row[0] for row in rows(folder)] == ["round", *map(str, range(1, number + 1))]


def test_special_characters_stay_in_their_cells(folder: RunFolder) -> None:
    rounds = Rounds(folder)
    texts = ["a\rb", "c\nd", 'e"f', "g,h", "\udcff"]
    rounds.finish(0, note="")
    for number, text in enumerate(texts, 1):
        rounds.finish(number, note=text)
        rounds.table.extend(rounds.history.rounds)
    assert [row[2] for row in rows(folder)[2:]] == [*texts[:-1], "?"]
