"""Log lines of workers say of which client and round they are, and each is there once."""

from __future__ import annotations

import ast
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from run_server_lines import Caller

import flower_gpu
from flower_gpu.calls.runner import run_call
from flower_gpu.calls.settings import CallSettings
from flower_gpu.workers import events
from flower_gpu.workers.call import Call

pytestmark = pytest.mark.timeout(120)

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
    """Return the messages, without what Flower's format has in front."""
    shown = COLOR.sub("", text).splitlines()
    return [re.sub(r"^WARNING : +", "", line) for line in shown]


def expected(prefix: str) -> list[str]:
    return [message.format(prefix) for message in MESSAGES]


def call(task: str, client: str | None, server_round: int | None, start_method: str, *args: object) -> object:
    settings = CallSettings.resolve({"start_method": start_method, "gpu": "never", "name": client})
    return run_call(task, args, settings=settings, kind="fit", server_round=server_round)


@pytest.mark.parametrize("with_flower", [False, True], ids=["alone", "with flwr"])
def test_lines_of_a_worker(
    start_method: str, with_flower: bool, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if start_method == "fork":  # it has this process's handlers: pytest's
        monkeypatch.setattr(logging.getLogger("flwr"), "handlers", [])
        monkeypatch.setattr(logging.getLogger(), "handlers", [])
        if with_flower or "flwr" in sys.modules:
            pytest.skip("whether flwr is imported is decided in this process")
    call("tasks_log:log", "3", 2, start_method, with_flower)
    assert lines(capfd.readouterr().err) == expected("client 3, round 2: ")
    assert events.log_prefix() == ""


@pytest.mark.parametrize(
    ("client", "server_round", "prefix"),
    [
        ("3", 2, "client 3, round 2: "),
        ("3", 0, "client 3, round 0: "),
        ("3", None, "client 3: "),
        (None, 2, "server, round 2: "),
        (None, None, "server: "),
        ("50 %s %(x)s", 1, "client 50 %s %(x)s, round 1: "),
        ("7\nERROR: 8\x1b[2J", 1, r"client '7\nERROR: 8\x1b[2J', round 1: "),
    ],
)
def test_what_is_in_front(
    client: str | None, server_round: int | None, prefix: str, capfd: pytest.CaptureFixture[str]
) -> None:
    call("tasks_log:log", client, server_round, "forkserver")
    # Not as a template: the prefix may look like one.
    wanted = [message.replace("{}", prefix).replace("{{", "{").replace("}}", "}") for message in MESSAGES]
    assert lines(capfd.readouterr().err) == wanted


def test_a_worker_of_a_worker_is_of_the_same_client(capfd: pytest.CaptureFixture[str]) -> None:
    call("tasks_log:log_in_a_worker_of_this_one", "3", 2, "spawn")
    assert lines(capfd.readouterr().err) == expected("client 3, round 2: ")


def test_what_cannot_be_a_text_does_not_end_the_task() -> None:
    assert call("tasks_log:log_what_has_no_text", "3", 2, "forkserver") == "went on"


@pytest.fixture
def caller() -> Iterator[Caller]:
    made = Caller()
    yield made
    made.close()


def test_a_worker_that_is_used_again_names_each_client(
    caller: Caller, capfd: pytest.CaptureFixture[str]
) -> None:
    line = caller.line()
    for client in (3, 4):
        line.begin()
        line.run(Call("tasks_log:log", log_prefix=f"client {client}, round 1: "), calls=3)
        assert lines(capfd.readouterr().err) == expected(f"client {client}, round 1: ")
    line.begin()
    assert line.run(Call("tasks_log:filters"), calls=3) == {"flwr": 1, "flwr.flower_gpu": 1}


SCRIPT = """
import sys
{imports}
from flower_gpu.calls import leasing
leasing.say("a line")
leasing.say_once("a line that is said once")
leasing.say_once("a line that is said once")
print([name for name in ("flwr",) if name in sys.modules])
"""


@pytest.mark.parametrize(
    "imports",
    ["", "import flwr.common.logger", "import logging; logging.basicConfig()"],
    ids=["alone", "flwr's logger", "basicConfig"],
)
def test_a_line_of_a_script_or_client_is_there_once(imports: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(imports=imports)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0
    shown = [re.sub(r"^WARNING:flwr.flower_gpu:", "", line) for line in lines(done.stderr)]
    assert shown == ["a line", "a line that is said once"]
    assert done.stdout == ("['flwr']\n" if "flwr" in imports else "[]\n")


def test_every_logger_is_flowers_or_below_it() -> None:
    """So that one handler and one format is that of all lines."""
    made = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("getLogger"):
                made[f"{path.relative_to(PACKAGE)}:{node.lineno}"] = [ast.unparse(each) for each in node.args]
    assert made
    own = {place: names for place, names in made.items() if names not in (["name"], ["events.LOGGER"])}
    assert {names[0] for names in own.values()} <= {"'flwr'", "'flwr.flower_gpu'"}, own
    assert events.LOGGER == "flwr.flower_gpu"
