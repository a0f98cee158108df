"""What is remembered of a worker's output, and how it is read."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from flower_gpu.workers.outcomes import MOST_IN_A_FILE, Lines, Stream, Tail, echo


def cut(*chunks: bytes) -> list[str]:
    lines: list[str] = []
    take = Lines(lines.append)
    for chunk in chunks:
        take(chunk)
    return lines


@pytest.mark.parametrize(
    ("chunks", "lines"),
    [
        ([b"one\ntwo\n"], ["one", "two"]),
        ([b"on", b"e\ntw", b"o\n"], ["one", "two"]),
        ([b"unfinished"], []),
        ([b"unfinished", b""], ["unfinished"]),
        ([b"one\n", b""], ["one"]),
        ([b"\n\n"], ["", ""]),
        (["é".encode()[:1], "é".encode()[1:] + b"\n"], ["é"]),
        ([b"\xff\n"], ["\ufffd"]),
    ],
)
def test_lines(chunks: list[bytes], lines: list[str]) -> None:
    assert cut(*chunks) == lines


def tail_of(text: str) -> str:
    tail = Tail()
    take = tail.reader()
    take(text.encode())
    take(b"")
    return str(tail)


def test_tail_keeps_the_last_lines() -> None:
    assert tail_of("") == ""
    assert tail_of("one\ntwo") == "one\ntwo"
    assert tail_of("\n".join(map(str, range(2000)))).splitlines() == [str(n) for n in range(1970, 2000)]


def test_tail_of_a_bar_is_its_last_state() -> None:
    assert tail_of("\r 10%\r 20%\nwindows\r\n\r 30%\r") == " 20%\nwindows\n 30%"


def test_tail_of_an_endless_line_stays_short() -> None:
    tail = Tail()
    take = tail.reader()
    for _ in range(100):
        take(b"x" * 100_000)
    take(b"the end\n")
    assert str(tail).endswith("xthe end")
    assert len(str(tail)) == 500


STACKS = """\
a line before
Fatal Python error: Segmentation fault

Thread 0x1 (most recent call first):
  File "threading.py", line 1 in wait

Current thread 0x2 (most recent call first):
  File "task.py", line 2 in innermost
{frames}
Thread 0x3 (most recent call first):
  File "other.py", line 3 in wait
Extension modules: numpy
a line after
"""


def test_tail_of_stacks_shows_the_thread_that_matters() -> None:
    """In a fork the stack goes on with that of the caller, and there may be many threads."""
    frames = "".join(f'  File "pytest.py", line {n} in caller\n' for n in range(60))
    shown = tail_of(STACKS.format(frames=frames)).splitlines()
    assert shown[:3] == ["a line before", "Fatal Python error: Segmentation fault", ""]
    assert shown[3:5] == [
        "Current thread 0x2 (most recent call first):",
        '  File "task.py", line 2 in innermost',
    ]
    assert shown[-2:] == ["Extension modules: numpy", "a line after"]
    assert len(shown) < 30


def test_tail_without_a_current_thread_shows_the_last() -> None:
    text = STACKS.replace("Current thread 0x2", "Thread 0x2").format(frames="")
    assert '  File "other.py", line 3 in wait' in tail_of(text)
    assert "innermost" not in tail_of(text)


def test_drain_is_bounded() -> None:
    """A process that left the worker's group may write faster than we read, for ever."""
    descriptor = os.open("/dev/zero", os.O_RDONLY)
    try:
        received: list[int] = []
        Stream(descriptor, lambda data: received.append(len(data))).drain()
    finally:
        os.close(descriptor)
    assert sum(received) == 1 << 20
    assert received[-1] == 0  # the unfinished line is flushed


def test_stream_reads_without_waiting() -> None:
    read, write = os.pipe()
    received: list[bytes] = []
    stream = Stream(read, received.append)
    assert stream.read()  # nothing yet, but not the end
    os.write(write, b"one")
    assert stream.read()
    os.close(write)
    assert not stream.read()
    os.close(read)
    assert received == [b"one"]


class Unwritable(io.StringIO):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def write(self, text: str) -> int:
        raise self.error


@pytest.mark.parametrize("error", [BrokenPipeError(32, "Broken pipe"), ValueError("closed file")])
def test_echo_to_a_stream_that_cannot_be_written(error: Exception) -> None:
    tail = Tail()
    for target in (Unwritable(error), None):
        echo(target, tail)(b"a line\n")
    assert str(tail) == "a line\na line"


@pytest.mark.parametrize("encoding", ["ascii", "utf-8", "no such encoding"])
def test_echo_to_any_encoding(encoding: str) -> None:
    class Target(io.StringIO):
        pass

    target = Target()
    Target.encoding = encoding  # type: ignore[assignment,misc]
    tail = Tail()
    take: Callable[[bytes], None] = echo(target, tail)
    for byte in "é\n".encode():  # also when a character comes in two pieces
        take(bytes([byte]))
    assert str(tail) == "é"
    assert target.getvalue() == {"ascii": "\\xe9\n", "utf-8": "é\n", "no such encoding": ""}[encoding]


def test_a_file_gets_so_much_of_a_call_and_no_more(tmp_path: Path) -> None:
    tail = Tail()
    with open(tmp_path / "log", "w") as file:
        on_data = echo(file, tail)
        for number in range(100):
            on_data(f"{number}".encode() + b"x" * 1_000_000 + b"\n")
        on_data(b"the end\n")
    written = (tmp_path / "log").read_text()
    assert MOST_IN_A_FILE <= len(written) < MOST_IN_A_FILE + 1000
    assert written.endswith("[flower-gpu: more than 16 MiB; the rest of this call is not here]\n")
    assert str(tail).endswith("the end"), "errors quote the last lines all the same"
