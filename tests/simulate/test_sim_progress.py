"""What a run shows: bars on a terminal that nothing tears, lines elsewhere, and the summary at its end."""

from __future__ import annotations

import os
import pty
import struct
import subprocess
import sys
import termios
from concurrent.futures import ThreadPoolExecutor
from fcntl import ioctl
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flower_gpu.simulation import progress as progress_module
from flower_gpu.simulation.events import PhaseFinished, PhaseStarted, Replied, RunResumed, RunStarted
from flower_gpu.simulation.progress import Progress, duration
from flower_gpu.simulation.summary_text import summary_lines
from flower_gpu.simulation.totals import Totals

pytestmark = pytest.mark.timeout(60)

COLUMNS, ROWS = 80, 200


class Screen:
    """A terminal, as far as tqdm and a log use one."""

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
        assert process.wait(timeout=30) == 0, written.decode(errors="replace")
    screen = Screen()
    screen.write(written.decode())
    return screen.text()


ON_A_TERMINAL = """
import logging, sys
from concurrent.futures import ThreadPoolExecutor
from flwr.common.logger import log
from flower_gpu.simulation.progress import Progress
before = sys.stdout, [handler.stream for handler in logging.getLogger("flwr").handlers]
progress = Progress(2)
progress.run_started(2)
for server_round in (1, 2):
    progress.round_started(server_round, "train", 50)
    def work(number):
        if number % 10 == 0:
            text = "log line %s of round %s, and it is as long as a line can be that does not fit"
            log(logging.INFO, text, number, server_round)
        if number % 10 == 5:
            sys.stdout.write(f"printed {number} {server_round}\\n")
        progress.reply(failed=number == 7)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(50)))
    END
    progress.round_finished(server_round, "train", {"loss": 0.5})
progress.close()
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
    bars = [line for line in lines if "|" in line]
    assert len(bars) == 1, "what stays is the bar over the rounds"
    assert bars[0].startswith("rounds |") and "| 2/2, 00:0" in bars[0] and bars[0].endswith("loss 0.5")


def test_within_a_round_both_bars_are_there_and_fit() -> None:
    # The last reply is drawn for sure: it comes later than the least time between two drawings.
    end = "import os, time; time.sleep(0.3); progress.reply(False); os._exit(0)"
    code = ON_A_TERMINAL.replace("END", end).replace('"train", 50', '"train", 51')
    lines = [line for line in shown_on_a_terminal(code) if line]
    over_rounds, over_clients = lines[-2:]
    assert over_rounds.startswith("rounds |") and "| 0/2, 00:0" in over_rounds
    assert over_clients.startswith("round 1 train |")
    assert "| 51/51, " in over_clients
    assert "clients/s, 1 failed, 00:00 left" in over_clients
    assert max(map(len, lines[-2:])) <= COLUMNS


def test_elsewhere_there_is_a_line_for_each_round(capfd: pytest.CaptureFixture[str]) -> None:
    progress = Progress()
    progress.on_event(RunStarted("FedAvg", 2))
    progress.on_event(PhaseFinished(0, "server-evaluate", metrics={"loss": 2.5}))
    for server_round in (1, 2):
        for kind in ("train", "evaluate"):
            progress.on_event(PhaseStarted(server_round, kind, 3))
            for client in range(3):
                progress.on_event(Replied(server_round, kind, client, "it broke" if client == 1 else None))
            progress.on_event(PhaseFinished(server_round, kind, 2, 1, 3, 0.5, {"score": 1.25, "text": "x"}))
    progress.close()
    out, err = capfd.readouterr()
    assert out == ""
    one = "3 clients (1 failed) in 0.5 s score 1.25"
    assert err.splitlines() == [
        "before round 1: server-evaluate loss 2.5",
        *[f"round {n}/2: train {one}; evaluate {one}" for n in (1, 2)],
    ]


def test_within_a_long_round_there_is_a_line_now_and_then(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    progress = Progress(3)
    progress.round_started(2, "train", 4)
    progress.reply(failed=False)
    progress.reply(failed=True)
    assert capfd.readouterr().err == ""
    monkeypatch.setattr(progress_module, "_LINE_INTERVAL_S", 0.0)
    progress.reply(failed=False)
    line = capfd.readouterr().err
    assert line.startswith("round 2/3 train: 3 of 4 clients, 1 failed, ")
    assert line.endswith(" s left\n") and " clients/s, " in line


def test_it_can_be_silent_and_survives_a_closed_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    code = """
import os, sys
from flower_gpu.simulation.progress import Progress
if sys.argv[1] == "closed":
    sys.stderr.close()
progress = Progress(1, is_shown=sys.argv[1] != "silent")
progress.round_started(1, "train", 1)
progress.reply(True)
progress.round_finished()
progress.close()
print("fine")
"""
    for how in ("silent", "closed"):
        done = subprocess.run(
            [sys.executable, "-c", code, how], capture_output=True, text=True, timeout=50, check=True
        )
        assert (done.stdout, done.stderr) == ("fine\n", "")


def test_replies_of_many_threads_are_all_counted(capfd: pytest.CaptureFixture[str]) -> None:
    progress = Progress(1)
    progress.round_started(1, "train", None)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: progress.reply(number % 3 == 0), range(3000)))
    progress.round_finished()
    progress.close()
    assert "round 1/1: train 3000 clients (1000 failed) in" in capfd.readouterr().err


def test_a_resumed_run_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    progress = Progress()
    progress.on_event(RunStarted("FedAvg", 9))
    progress.on_event(RunResumed(4))
    progress.close()
    assert capfd.readouterr().err == "resumed after round 4/9\n"


@settings(deadline=None)
@given(st.floats(0, 1e6))
def test_durations_are_written_as_one_would_say_them(seconds: float) -> None:
    text = duration(seconds)
    numbers = [float(part) for part in text.split() if part[0].isdigit()]
    units = [part for part in text.split() if not part[0].isdigit()]
    worth = {"s": 1, "min": 60, "h": 3600}
    shown = sum(number * worth[unit] for number, unit in zip(numbers, units, strict=True))
    # Half of the last digit that is shown.
    assert shown == pytest.approx(seconds, abs={"s": 0.051, "min": 0.51, "h": 30.1}[units[0]])
    assert all(number < 60 for number, unit in zip(numbers, units, strict=True) if unit != "h")


def summary_of(failures: list[Replied], **facts: Any) -> dict[str, Any]:
    totals = Totals(100)
    totals.on_event(RunStarted("FedAvg", 5))
    for event in failures:
        totals.on_event(event)
    totals.on_event(PhaseFinished(2, "train", 90, 10, 200, 1.5, {"loss": 0.25}))
    totals.on_event(PhaseFinished(2, "server-evaluate", metrics={"accuracy": 0.875, "loss": 0.5}))
    return totals.as_dict("completed", **facts)


def test_the_summary_has_what_one_wants_to_know() -> None:
    lines = summary_lines(
        summary_of([], workers_started=12, peak_worker_bytes=300 << 20), "runs/2026-01-31_12-00-00"
    )
    shown = dict(line.split(maxsplit=1) for line in lines)
    assert shown.pop("time").startswith("0.0 s, ")
    assert shown == {
        "outcome": "completed",
        "rounds": "2 of 5",
        "clients": "100, 200 messages, 0 failed",
        "workers": "12 started, with 300 MiB at most",
        "train": "loss 0.25",
        "server-evaluate": "accuracy 0.875, loss 0.5",
        "results": "runs/2026-01-31_12-00-00",
    }


def test_failed_clients_are_named_with_their_reason() -> None:
    failures = [
        Replied(server_round, kind, client, f"{kind} of client {client}: ValueError: no data")
        for server_round in (1, 2)
        for client in (8, 3)
        for kind in ("train", "evaluate")
    ]
    failures.append(Replied(2, "train", 3, "no reply within 60 s"))
    lines = summary_lines(summary_of(failures), None)
    assert lines[lines.index("failed:") :] == [
        "failed:",
        "  client 3, train and evaluate in rounds 1, 2: ValueError: no data",
        "  client 3, train in round 2: no reply within 60 s",
        "  client 8, train and evaluate in rounds 1, 2: ValueError: no data",
    ]


@settings(deadline=None)
@given(st.integers(1, 400), st.integers(1, 300))
def test_of_many_failed_clients_ten_are_named_and_all_are_counted(clients: int, reasons: int) -> None:
    failures = [Replied(1, "train", client, f"reason {client % reasons}") for client in range(clients)]
    summary = summary_of(failures)
    lines = summary_lines(summary, None)
    named = lines[lines.index("failed:") + 1 :]
    more = clients - 10
    if more > 0:
        assert named.pop() == f"  and {more} more failed messages"
    assert len(named) == min(clients, 10)
    assert summary["failed"] == clients == sum(reason["count"] for reason in summary["failures"])
