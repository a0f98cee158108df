"""The display of a run: progress bars on a terminal, which other output does not break, otherwise lines."""

from __future__ import annotations

import os
import pty
import re
import struct
import subprocess
import sys
import termios
from fcntl import ioctl
from typing import Any

import pytest
from run_programs import run_python

from flower_gpu import trace
from flower_gpu.watch import display as display_module
from flower_gpu.watch.display import Notebook, make_display
from flower_gpu.watch.history import History

COLUMNS, ROWS = 80, 200


class Screen:
    """A terminal that knows the escape sequences that rich and a log use."""

    def __init__(self) -> None:
        self.lines = [[" "] * COLUMNS]
        self._row = self._column = 0

    def write(self, text: str) -> None:
        rest = iter(text)
        for char in rest:
            if char == "\r":
                self._column = 0
            elif char == "\n":
                self._row += 1
            elif char == "\x1b":
                assert next(rest) == "["
                code = ""
                while not (char := next(rest)).isalpha():
                    code += char
                if char == "A":
                    self._row -= int(code or 1)
                elif char + code == "K2":
                    self.lines[self._row] = [" "] * COLUMNS
                elif char in "hl":  # show or hide the cursor
                    pass
                elif char == "K":
                    self.lines[self._row][self._column :] = " " * (COLUMNS - self._column)
                else:
                    assert char == "m", f"unknown escape code: {char}"
            else:
                if self._column == COLUMNS:
                    self._row, self._column = self._row + 1, 0
                self._grow()
                self.lines[self._row][self._column] = char
                self._column += 1
            self._grow()

    def text(self) -> list[str]:
        return ["".join(line).rstrip() for line in self.lines]

    def _grow(self) -> None:
        while len(self.lines) <= self._row:
            self.lines.append([" "] * COLUMNS)


def screen_lines(code: str) -> list[str]:
    """Run Python code on a terminal with 80 columns. Return the lines on its screen at the end."""
    master, slave = pty.openpty()
    ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    env = {**os.environ, "TERM": "xterm"}
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.DEVNULL, stdout=slave, stderr=slave, env=env
    ) as process:
        os.close(slave)
        written = b""
        while True:
            try:
                part = os.read(master, 4096)
            except OSError:  # Linux reports EIO once the other end is closed
                break
            if not part:
                break
            written += part
        os.close(master)
        assert process.wait(timeout=60) == 0, written.decode(errors="replace")
    screen = Screen()
    screen.write(written.decode())
    return screen.text()


RUN = """
import logging, sys, threading
from flower_gpu import trace
from flower_gpu.watch.display import make_display
from flower_gpu.watch.history import History
history = History(keep_finished=False)
display = make_display(history, sys.stderr)
lock = threading.Lock()
def tell(event, **fields):
    with lock:  # a recorder does the same
        event = trace.make(event, **fields)
        history.feed([event])
        display.show(event)
"""
ON_A_TERMINAL = f"""
from concurrent.futures import ThreadPoolExecutor
from flwr.common.logger import log
{RUN}
before = sys.stdout, [handler.stream for handler in logging.getLogger("flwr").handlers]
tell("strategy_started", num_rounds=2)
for server_round in (1, 2):
    which = dict(round=server_round, task="train")
    tell("round_started", **which, messages=50)
    def work(number):
        if number % 10 == 0:
            text = "log line %s of round %s, and it is as long as a line can be that does not fit"
            log(logging.INFO, text, number, server_round)
        if number % 10 == 5:
            sys.stdout.write(f"printed {{number}} {{server_round}}\\n")
        tell("reply", **which, error="no" if number == 7 else None)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(50)))
    END
    tell("round_finished", **which, messages=50, failed=1, seconds=1.0, metrics={{"loss": 0.5}})
display.close()
assert threading.active_count() == 1
assert before == (sys.stdout, [handler.stream for handler in logging.getLogger("flwr").handlers])
print("after")
"""


def test_log_and_printed_lines_are_intact_above_the_bars() -> None:
    lines = screen_lines(ON_A_TERMINAL.replace("END", "pass"))
    for server_round in (1, 2):
        for number in range(50):
            expected = int(number % 10 == 5)
            assert lines.count(f"printed {number} {server_round}") == expected
            text = f"log line {number} of round {server_round}, and"
            indices = [index for index, line in enumerate(lines) if text in line]
            assert len(indices) == int(number % 10 == 0)
            # The log line is longer than 80 columns.
            for index in indices:
                joined_line = lines[index] + lines[index + 1]
                assert joined_line.replace(" ", "").endswith("asalinecanbethatdoesnotfit"), joined_line
    assert lines[-2:] == ["after", ""]
    (bar,) = [line for line in lines if "\N{BOX DRAWINGS HEAVY HORIZONTAL}" in line]
    assert re.match("rounds +\N{BOX DRAWINGS HEAVY HORIZONTAL}", bar), "only the bar of the rounds stays"
    assert re.search(r" 2/2, \d", bar) and bar.endswith("loss 0.5")


def test_within_a_round_both_bars_are_shown_and_fit_the_screen() -> None:
    # The last reply is certainly drawn, because it arrives after the minimum interval between two drawings.
    end = "import os, time; time.sleep(0.3); tell('reply', **which, error=None); os._exit(0)"
    code = ON_A_TERMINAL.replace("END", end).replace("messages=50", "messages=51", 1)
    lines = [line for line in screen_lines(code) if line]
    over_rounds, over_clients = lines[-2:]
    bars = {re.search("\N{BOX DRAWINGS HEAVY HORIZONTAL}", line) for line in lines[-2:]}
    assert len({bar.start() for bar in bars if bar}) == 1, "the bars are not aligned"
    assert over_rounds.startswith("rounds ") and re.search(r" 0/2, \d", over_rounds)
    assert over_clients.startswith("round 1 train ")
    assert " 51/51, 1 failed" in over_clients
    assert max(map(len, lines[-2:])) <= COLUMNS


class RunWithDisplay:
    """A run with a display on stderr."""

    def __init__(self, num_rounds: int | None = None, is_shown: bool = True) -> None:
        self.history = History(keep_finished=False)
        self.history.rounds.num_rounds = num_rounds
        self.display = make_display(self.history, sys.stderr, is_shown)

    def report(self, event: str, **fields: Any) -> None:
        record = trace.make(event, **fields)
        self.history.feed([record])
        self.display.show(record)


def show_run(shown: RunWithDisplay) -> None:
    shown.report("strategy_started", strategy="FedAvg", num_rounds=2)
    shown.report("round_finished", round=0, task="server-evaluate", messages=0, metrics={"loss": 2.5})
    for server_round in (1, 2):
        for kind in ("train", "evaluate"):
            round_fields = {"round": server_round, "task": kind}
            shown.report("round_started", **round_fields, messages=3)
            for client in range(3):
                shown.report("reply", **round_fields, node=client, error="it broke" if client == 1 else None)
            metrics = {"score": 1.25, "text": "x"}
            shown.report("round_finished", **round_fields, messages=3, failed=1, seconds=0.5, metrics=metrics)
    shown.display.close()


def test_without_a_terminal_lines_with_columns_are_written(capfd: pytest.CaptureFixture[str]) -> None:
    show_run(RunWithDisplay())
    out, err = capfd.readouterr()
    assert out == ""
    figures = "    3/3 clients  0.50 s  1 failed, score 1.25"
    assert err.splitlines() == [
        "round 0/2  server-evaluate                           loss 2.5",
        *[f"round {n}/2  {task:15}  {figures}" for n in (1, 2) for task in ("train", "evaluate")],
    ]
    # The columns stay aligned when the numbers grow.
    shown = RunWithDisplay()
    shown.report("strategy_started", strategy="FedAvg", num_rounds=120)
    for server_round, messages, seconds in ((9, 5, 3.0), (10, 20_000, 3_700.0), (110, 5, 59.0)):
        fields = {"round": server_round, "task": "train", "metrics": {"loss": 0.5}}
        shown.report("round_finished", **fields, messages=messages, failed=0, seconds=seconds)
    assert capfd.readouterr().err.splitlines() == [
        "round   9/120  train                5/5 clients  3.00 s  loss 0.5",
        "round  10/120  train            20000/20000 clients  1 h 2 min  loss 0.5",
        "round 110/120  train                    5/5 clients     59.0 s  loss 0.5",
    ]


def test_a_long_round_writes_a_line_from_time_to_time(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = RunWithDisplay(3)
    round_fields = {"round": 2, "task": "train"}
    shown.report("round_started", **round_fields, messages=4)
    shown.report("reply", **round_fields, error=None)
    shown.report("reply", **round_fields, error="no")
    assert capfd.readouterr().err == ""
    monkeypatch.setattr(display_module, "_LINE_INTERVAL_S", 0.0)
    shown.report("reply", **round_fields, error=None)
    line = capfd.readouterr().err
    # The first replies say nothing about the speed, so the line has no estimate.
    assert re.fullmatch(r"round 2/3  train                3/4 clients  [\d.]+ s  1 failed\n", line)
    shown.report("reply", **round_fields, error=None)
    assert capfd.readouterr().err == "", "the last reply is reported by the line of the round's end"


def test_a_notebook_shows_bars(capfd: pytest.CaptureFixture[str]) -> None:
    shown = RunWithDisplay()
    shown.display = Notebook(shown.history, sys.stderr)
    show_run(shown)
    drawn = capfd.readouterr().err
    assert "rounds |" in drawn and "round 2 evaluate |" in drawn and "| 0/3" in drawn
    assert drawn.split("\r")[-1].rstrip().endswith("score 1.25") and "2/2, " in drawn.split("\r")[-1]


def test_a_display_can_be_silent_and_a_resumed_run_is_reported(capfd: pytest.CaptureFixture[str]) -> None:
    show_run(RunWithDisplay(is_shown=False))
    assert capfd.readouterr() == ("", "")
    shown = RunWithDisplay()
    shown.report("strategy_started", strategy="FedAvg", num_rounds=9)
    shown.report("strategy_resumed", round=4)
    shown.display.close()
    assert capfd.readouterr().err == "resumed after round 4/9\n"


def test_a_closed_stderr_does_not_end_the_run() -> None:
    code = f"""{RUN}
sys.stderr.close()
tell("round_started", round=1, task="train", messages=1)
tell("round_finished", round=1, task="train", messages=1, failed=1, seconds=1.0, metrics={{}})
display.close()
print("fine")
"""
    process = run_python(code, check=True)
    assert (process.stdout, process.stderr) == ("fine\n", "")
