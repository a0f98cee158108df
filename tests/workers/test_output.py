"""Output of workers: how it is read and kept for errors, and log lines that name their client."""

from __future__ import annotations

import ast
import io
import logging
import os
import re
import sys
from pathlib import Path

import pytest
from run_programs import run_python
from worker_lines import Caller

import flower_gpu
from flower_gpu.calls.runner import run_call
from flower_gpu.calls.settings import call_settings
from flower_gpu.workers import events
from flower_gpu.workers.call import Call
from flower_gpu.workers.output import MOST_IN_A_FILE, Stream, Tail, echo


def tail_of(text: str) -> str:
    tail = Tail()
    add = tail.reader()
    add(text)
    add("")
    return str(tail)


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


def test_the_tail_of_stacks_shows_the_current_thread() -> None:
    """In a fork, the stack of the caller follows, and there may be many threads."""
    frames = "".join(f'  File "pytest.py", line {n} in caller\n' for n in range(60))
    shown = tail_of(STACKS.format(frames=frames)).splitlines()
    assert shown[:3] == ["a line before", "Fatal Python error: Segmentation fault", ""]
    assert shown[3:5] == [
        "Current thread 0x2 (most recent call first):",
        '  File "task.py", line 2 in innermost',
    ]
    assert shown[-2:] == ["Extension modules: numpy", "a line after"]
    assert len(shown) < 30


def test_the_tail_without_a_current_thread_shows_the_last_thread() -> None:
    text = STACKS.replace("Current thread 0x2", "Thread 0x2").format(frames="")
    assert '  File "other.py", line 3 in wait' in tail_of(text)
    assert "innermost" not in tail_of(text)


def test_drain_is_bounded() -> None:
    """A process that left the worker's group may write faster than we can read, for ever."""
    descriptor = os.open("/dev/zero", os.O_RDONLY)
    try:
        received: list[int] = []
        Stream(descriptor, lambda data: received.append(len(data))).drain()
    finally:
        os.close(descriptor)
    assert sum(received) == 1 << 20
    assert received[-1] == 0  # The unfinished line is flushed.


class Unwritable(io.StringIO):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def write(self, text: str) -> int:
        raise self.error


@pytest.mark.parametrize("error", [BrokenPipeError(32, "Broken pipe"), ValueError("closed file")])
def test_echo_ignores_a_stream_that_cannot_be_written(error: Exception) -> None:
    tail = Tail()
    for target in (Unwritable(error), None):
        echo(target, tail)(b"a line\n")
    assert str(tail) == "a line\na line"


def test_the_output_of_a_call_in_a_file_is_limited(tmp_path: Path) -> None:
    tail = Tail()
    with open(tmp_path / "log", "w") as file:
        on_data = echo(file, tail)
        for number in range(100):
            on_data(f"{number}".encode() + b"x" * 1_000_000 + b"\n")
        on_data(b"the end\n")
    written = (tmp_path / "log").read_text()
    assert MOST_IN_A_FILE <= len(written) < MOST_IN_A_FILE + 1000
    assert written.endswith("[flower-gpu: more than 16 MiB; the rest of this call's output is left out]\n")
    assert str(tail).endswith("the end"), "errors must still quote the last lines"


def test_lines_of_a_named_call_start_with_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A log line already has the name, a bar is shown in its last state, and the file is limited."""
    monkeypatch.setenv("FLOWER_GPU_RUN_DIR", str(tmp_path))
    shown, tail = io.StringIO(), Tail()
    on_data = echo(shown, tail, "client 3: ")
    chunks = [b"on", b"e\ntw", b"o\r\nINFO: client 3: logged\n", b"10 %\r", b"50 %\r100 %\n\n", b"x" * 70_000]
    lines = ["client 3: one", "client 3: two", "INFO: client 3: logged", "client 3: 100 %", "client 3: "]
    for chunk in [*chunks, "é".encode()[:1], "é".encode()[1:] + b"\nlast", b""]:
        on_data(chunk)
    lines += ["client 3: " + "x" * 70_000, "client 3: é", "client 3: last"]
    assert shown.getvalue().splitlines() == lines
    assert (tmp_path / "clients.log").read_text() == shown.getvalue()
    for _ in range(20):
        on_data(b"y" * (1 << 20) + b"\n")
    written = (tmp_path / "clients.log").read_text()
    assert MOST_IN_A_FILE <= len(written) < MOST_IN_A_FILE + 1000
    assert written.endswith("the rest of this call's output is left out]\n")
    assert shown.getvalue().count("y") == 20 << 20


PACKAGE = Path(flower_gpu.__file__).parent
COLOR = re.compile(r"\x1b\[\d+m")
MESSAGES = [
    "{}of 'flwr': 5 %",
    "{}of 'flwr.flower_gpu': 5 %",
    "of 'flower_gpu': 5 %",
    "of 'my.own': 5 %",
    "of 'flwr.my.own': 5 %",
    "of '': 5 %",
    "{}100 %",
    "{}{{'a': 1}}",
    "",
]


def lines(text: str) -> list[str]:
    """Return the messages without colors and the prefix of Flower's format."""
    shown = COLOR.sub("", text).splitlines()
    return [re.sub(r"^WARNING : +", "", line) for line in shown]


def expected(prefix: str) -> list[str]:
    return [message.format(prefix) for message in MESSAGES]


def call(task: str, client: str | None, server_round: int | None, start_method: str, *args: object) -> object:
    settings = call_settings({"start_method": start_method, "gpu": "never", "name": client})
    return run_call(task, args, settings=settings, kind="fit", server_round=server_round)


@pytest.mark.parametrize("with_flower", [False, True], ids=["alone", "with flwr"])
def test_log_lines_of_a_worker_name_its_client(
    start_method: str, with_flower: bool, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if start_method == "fork":  # The fork inherits pytest's handlers from this process.
        monkeypatch.setattr(logging.getLogger("flwr"), "handlers", [])
        monkeypatch.setattr(logging.getLogger(), "handlers", [])
        if with_flower or "flwr" in sys.modules:
            pytest.skip("a fork inherits the modules of this process")
    call("plain_tasks:log", "3", 2, start_method, with_flower)
    assert lines(capfd.readouterr().err) == expected("client 3, round 2: ")
    assert events.log_prefix() == ""


@pytest.mark.parametrize(
    ("client", "server_round", "prefix"),
    [
        ("3", 0, "client 3, round 0: "),
        (None, 2, "server, round 2: "),
        (None, None, "server: "),
        ("50 %s %(x)s", 1, "client 50 %s %(x)s, round 1: "),
        ("7\nERROR: 8\x1b[2J", 1, r"client '7\nERROR: 8\x1b[2J', round 1: "),
    ],
)
def test_the_prefix_names_client_and_round(
    client: str | None, server_round: int | None, prefix: str, capfd: pytest.CaptureFixture[str]
) -> None:
    call("plain_tasks:log", client, server_round, "forkserver")
    # The prefix may contain braces, so ``str.format`` cannot be used.
    with_prefix = [
        message.replace("{}", prefix).replace("{{", "{").replace("}}", "}") for message in MESSAGES
    ]
    assert lines(capfd.readouterr().err) == with_prefix


def test_a_nested_worker_has_the_same_prefix(capfd: pytest.CaptureFixture[str]) -> None:
    call("plain_tasks:log_in_a_nested_worker", "3", 2, "spawn")
    assert lines(capfd.readouterr().err) == expected("client 3, round 2: ")


def test_a_message_without_text_does_not_fail_the_task() -> None:
    assert call("plain_tasks:log_an_object_without_text", "3", 2, "forkserver") == "went on"


def test_a_reused_worker_names_each_client(caller: Caller, capfd: pytest.CaptureFixture[str]) -> None:
    line = caller.line()
    for client in (3, 4):
        line.begin()
        line.run(Call("plain_tasks:log", log_prefix=f"client {client}, round 1: "), "forkserver", calls=3)
        assert lines(capfd.readouterr().err) == expected(f"client {client}, round 1: ")
    line.begin()
    assert line.run(Call("plain_tasks:filters"), "forkserver", calls=3) == {"flwr": 1, "flwr.flower_gpu": 1}


SCRIPT = """
import sys
{imports}
from flower_gpu.calls import notices
notices.say("a line")
notices.say_once("a line that is said once")
notices.say_once("a line that is said once")
print([name for name in ("flwr",) if name in sys.modules])
"""


@pytest.mark.parametrize(
    "imports",
    ["", "import flwr.common.logger", "import logging; logging.basicConfig()"],
    ids=["alone", "flwr's logger", "basicConfig"],
)
def test_a_notice_in_a_script_is_printed_once(imports: str) -> None:
    done = run_python(SCRIPT.format(imports=imports))
    assert done.returncode == 0
    shown = [re.sub(r"^WARNING:flwr.flower_gpu:", "", line) for line in lines(done.stderr)]
    assert shown == ["a line", "a line that is said once"]
    assert done.stdout == ("['flwr']\n" if "flwr" in imports else "[]\n")


def test_every_logger_is_flowers_or_a_child_of_it() -> None:
    """Then all log lines have the same handler and format."""
    names_by_place = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("getLogger"):
                names_by_place[f"{path.relative_to(PACKAGE)}:{node.lineno}"] = [
                    ast.unparse(argument) for argument in node.args
                ]
    assert names_by_place
    literal_names = {
        place: names for place, names in names_by_place.items() if names not in (["name"], ["events.LOGGER"])
    }
    silenced = {"'mlflow.store.db.utils'"}  # This library logs how it creates its tables.
    assert {names[0] for names in literal_names.values()} <= {"'flwr'", "'flwr.flower_gpu'"} | silenced, (
        literal_names
    )
    assert events.LOGGER == "flwr.flower_gpu"
