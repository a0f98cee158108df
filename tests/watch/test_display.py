"""What a run shows: bars on a terminal that nothing tears, lines elsewhere."""

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
    """A terminal, as far as rich and a log use one."""

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
                elif char in "hl":  # the cursor is shown, or not
                    pass
                elif char == "K":
                    self.lines[self._row][self._column :] = " " * (COLUMNS - self._column)
                else:
                    assert char == "m", f"a code this terminal does not know: {char}"
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


def shown_on_a_terminal(code: str) -> list[str]:
    """Run Python code with a terminal of 80 columns; return what its screen shows at the end."""
    ours, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    env = {**os.environ, "TERM": "xterm"}
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs, env=env
    ) as process:
        os.close(theirs)
        written = b""
        while True:
            try:
                part = os.read(ours, 4096)
            except OSError:  # as Linux tells that nobody has the other end any more
                break
            if not part:
                break
            written += part
        os.close(ours)
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
    with lock:  # as a recorder does
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


def test_log_lines_and_printed_ones_are_whole_above_the_bars() -> None:
    lines = shown_on_a_terminal(ON_A_TERMINAL.replace("END", "pass"))
    for server_round in (1, 2):
        for number in range(50):
            expected = int(number % 10 == 5)
            assert lines.count(f"printed {number} {server_round}") == expected
            text = f"log line {number} of round {server_round}, and"
            found = [index for index, line in enumerate(lines) if text in line]
            assert len(found) == int(number % 10 == 0)
            for index in found:  # 80 columns are not enough for it
                whole = lines[index] + lines[index + 1]
                assert whole.replace(" ", "").endswith("asalinecanbethatdoesnotfit"), whole
    assert lines[-2:] == ["after", ""]
    (bar,) = [line for line in lines if "\N{BOX DRAWINGS HEAVY HORIZONTAL}" in line]
    assert re.match("rounds +\N{BOX DRAWINGS HEAVY HORIZONTAL}", bar), "what stays is the bar over the rounds"
    assert re.search(r" 2/2, \d", bar) and bar.endswith("loss 0.5")


def test_within_a_round_both_bars_are_there_and_fit() -> None:
    # The last reply is drawn for sure: it comes later than the least time between two drawings.
    end = "import os, time; time.sleep(0.3); tell('reply', **which, error=None); os._exit(0)"
    code = ON_A_TERMINAL.replace("END", end).replace("messages=50", "messages=51", 1)
    lines = [line for line in shown_on_a_terminal(code) if line]
    over_rounds, over_clients = lines[-2:]
    bars = {re.search("\N{BOX DRAWINGS HEAVY HORIZONTAL}", line) for line in lines[-2:]}
    assert len({bar.start() for bar in bars if bar}) == 1, "they begin below each other"
    assert over_rounds.startswith("rounds ") and re.search(r" 0/2, \d", over_rounds)
    assert over_clients.startswith("round 1 train ")
    assert " 51/51, 1 failed" in over_clients
    assert max(map(len, lines[-2:])) <= COLUMNS


class Shown:
    """A run that is shown on stderr."""

    def __init__(self, num_rounds: int | None = None, is_shown: bool = True) -> None:
        self.history = History(keep_finished=False)
        self.history.num_rounds = num_rounds
        self.display = make_display(self.history, sys.stderr, is_shown)

    def tell(self, event: str, **fields: Any) -> None:
        made = trace.make(event, **fields)
        self.history.feed([made])
        self.display.show(made)


def a_run(shown: Shown) -> None:
    shown.tell("strategy_started", strategy="FedAvg", num_rounds=2)
    shown.tell("round_finished", round=0, task="server-evaluate", messages=0, metrics={"loss": 2.5})
    for server_round in (1, 2):
        for kind in ("train", "evaluate"):
            which = {"round": server_round, "task": kind}
            shown.tell("round_started", **which, messages=3)
            for client in range(3):
                shown.tell("reply", **which, node=client, error="it broke" if client == 1 else None)
            metrics = {"score": 1.25, "text": "x"}
            shown.tell("round_finished", **which, messages=3, failed=1, seconds=0.5, metrics=metrics)
    shown.display.close()


def test_elsewhere_there_are_lines_in_columns(capfd: pytest.CaptureFixture[str]) -> None:
    a_run(Shown())
    out, err = capfd.readouterr()
    assert out == ""
    told = "    3/3 clients  0.50 s  1 failed, score 1.25"
    assert err.splitlines() == [
        "round 0/2  server-evaluate                           loss 2.5",
        *[f"round {n}/2  {task:15}  {told}" for n in (1, 2) for task in ("train", "evaluate")],
    ]
    # They stay aligned when figures grow.
    shown = Shown()
    shown.tell("strategy_started", strategy="FedAvg", num_rounds=120)
    for server_round, messages, seconds in ((9, 5, 3.0), (10, 20_000, 3_700.0), (110, 5, 59.0)):
        fields = {"round": server_round, "task": "train", "metrics": {"loss": 0.5}}
        shown.tell("round_finished", **fields, messages=messages, failed=0, seconds=seconds)
    assert capfd.readouterr().err.splitlines() == [
        "round   9/120  train                5/5 clients  3.00 s  loss 0.5",
        "round  10/120  train            20000/20000 clients  1 h 2 min  loss 0.5",
        "round 110/120  train                    5/5 clients     59.0 s  loss 0.5",
    ]


def test_within_a_long_round_there_is_a_line_now_and_then(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = Shown(3)
    which = {"round": 2, "task": "train"}
    shown.tell("round_started", **which, messages=4)
    shown.tell("reply", **which, error=None)
    shown.tell("reply", **which, error="no")
    assert capfd.readouterr().err == ""
    monkeypatch.setattr(display_module, "_LINE_INTERVAL_S", 0.0)
    shown.tell("reply", **which, error=None)
    line = capfd.readouterr().err
    # How fast they are says nothing yet.
    assert re.fullmatch(r"round 2/3  train                3/4 clients  [\d.]+ s  1 failed\n", line)
    shown.tell("reply", **which, error=None)
    assert capfd.readouterr().err == "", "the line of the round's end has the last reply"


def test_a_notebook_has_bars(capfd: pytest.CaptureFixture[str]) -> None:
    shown = Shown()
    shown.display = Notebook(shown.history, sys.stderr)
    a_run(shown)
    drawn = capfd.readouterr().err
    assert "rounds |" in drawn and "round 2 evaluate |" in drawn and "| 0/3" in drawn
    assert drawn.split("\r")[-1].rstrip().endswith("score 1.25") and "2/2, " in drawn.split("\r")[-1]


def test_it_can_be_silent_and_a_resumed_run_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    a_run(Shown(is_shown=False))
    assert capfd.readouterr() == ("", "")
    shown = Shown()
    shown.tell("strategy_started", strategy="FedAvg", num_rounds=9)
    shown.tell("strategy_resumed", round=4)
    shown.display.close()
    assert capfd.readouterr().err == "resumed after round 4/9\n"


def test_a_closed_stderr_ends_no_run() -> None:
    code = f"""{RUN}
sys.stderr.close()
tell("round_started", round=1, task="train", messages=1)
tell("round_finished", round=1, task="train", messages=1, failed=1, seconds=1.0, metrics={{}})
display.close()
print("fine")
"""
    done = run_python(code, check=True)
    assert (done.stdout, done.stderr) == ("fine\n", "")
