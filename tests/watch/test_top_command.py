"""What `flower-gpu top` tells of leases, workers and runs that are there."""

from __future__ import annotations

import fcntl
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli.command_shell import Shell
from nvml_stub import GIB, Host
from top_traces import run_of
from waiting import until

from flower_gpu.cli import main as cli

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs/reference/top.md"
RESERVE = 256 * 2**20


def look(shell: Shell, *arguments: str) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(shell("top", "--json", *arguments))
    return told


def look_until(shell: Shell, is_so: Callable[[dict[str, Any]], bool], *arguments: str) -> dict[str, Any]:
    """Look again and again until it is as it should become."""
    return until(lambda: told if is_so(told := look(shell, *arguments)) else {})


def client(shell: Shell, folder: Path) -> subprocess.Popen[str]:
    """Start a client whose call goes on until a file is there."""
    env = {"FLOWER_GPU_RUN_DIR": str(folder), "PYTHONPATH": f"{HERE}:{HERE.parent}:{HERE.parents[1]}"}
    return shell.start(sys.executable, str(HERE / "top_client.py"), str(folder), env=env)


def test_gpus_and_leases_of_no_run_and_the_line_in_its_order(
    shell: Shell, host: Host, tmp_path: Path
) -> None:
    shell.on(host)
    host.set(0, util=35, temp=61)
    host.program(0, 2 * GIB)
    holder = shell.holder("fit of client 0", 12 * GIB, count=2)
    waiters = [
        shell.waiter("evaluate on the server", "alone"),
        shell.waiter("fit of client 3", "1.0", count=2),
        shell.waiter("fit of client \x1b[2J4", 12 * GIB),
    ]
    with run_of(shell, tmp_path / "a"), run_of(shell, tmp_path / "b"):
        told = look(shell)
    first, second = told["gpus"]
    assert (first["index"], first["uuid"]) == (0, host.uuids[0])
    assert (first["total_bytes"], first["used_bytes"]) == (16 * GIB, 2 * GIB)
    assert (first["utilization_percent"], first["temperature_c"]) == (35, 61)
    assert (first["programs_bytes"], second["programs_bytes"]) == (2 * GIB, 0)
    assert first["capacity_bytes"] == 14 * GIB - RESERVE
    assert first["own_leased_bytes"] == second["own_leased_bytes"] == 12 * GIB
    assert {gpu["other_leased_bytes"] for gpu in (first, second)} == {0}
    (held,) = told["workers"]
    assert (held["label"], held["phase"], held["pid"]) == ("fit of client 0", "held", holder.pid)
    assert (held["gpus"], held["lease_bytes"], held["user"]) == ([0, 1], 24 * GIB, told["account"])
    assert (held["used_bytes"], held["run"]) == (None, "")
    assert [row["pid"] for row in told["waiting"]] == [waiter.pid for waiter in waiters]
    asked = [[row[f"asked_{how}"] for how in ("bytes", "share", "alone")] for row in told["waiting"]]
    assert asked == [[None, None, True], [None, 1.0, False], [12 * GIB, None, False]]
    assert [row["count"] for row in told["waiting"]] == [1, 2, 1]
    # Runs of one name are told apart.
    one, other = told["runs"]
    assert one["run"].startswith("quickstart:") and one["folder"] != other["folder"]
    # Every key is documented.
    keys = [list(told), *(list(told[part][0]) for part in ("gpus", "runs", "workers", "waiting"))]
    keys.append(list(told["resources"]))
    assert told["resources"]["cores_leased"] == 0 < told["resources"]["cores"]
    _, _, page = PAGE.read_text().partition("## JSON")
    tables = [
        re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| (`.+?`) \|", part, re.MULTILINE)))
        for part in re.split(r"^Of .+:$", page, flags=re.MULTILINE)
    ]
    assert tables == keys
    text = shell("top", "--once", env={"COLUMNS": "100"})
    assert text.index("all on GPU 0,1") < text.index("1 on 2 of GPU 0,1") < text.index("12.0 GiB on GPU 0,1")
    assert "fit of client ?[2J4" in text
    assert "\x1b" not in text


def test_a_worker_and_what_it_tells(shell: Shell, host: Host, tmp_path: Path) -> None:
    shell.on(host)
    folder = tmp_path / "run"
    with run_of(shell, folder):
        ends = client(shell, folder)

        def is_in_the_middle(told: dict[str, Any]) -> bool:
            rows = told["workers"]
            return bool(rows) and rows[0]["progress_done"] == 13 and bool(rows[0]["used_bytes"])

        told = look_until(shell, is_in_the_middle)
        (run,), (row,) = told["runs"], told["workers"]
        assert (run["run"], run["kind"], run["folder"]) == ("quickstart", "launch", str(folder))
        assert (row["run"], row["client"], row["task"]) == ("quickstart", "7", "train")
        assert (row["phase"], row["progress"], row["progress_total"]) == ("running", "epoch \x1b[2J1", 40)
        assert (row["lease_bytes"], row["used_bytes"]) == (4 * GIB, GIB)
        (used,) = [gpu for gpu in told["gpus"] if gpu["own_leased_bytes"]]
        assert row["gpus"] == [used["index"]]
        assert (used["own_used_bytes"], used["programs_bytes"]) == (GIB, 0)
        text = shell("top", "--once", env={"COLUMNS": "120"})
        assert re.search(r"quickstart +7 +train .* 4\.0 +1\.0 .* running epoch \?\[2J1 13/40", text)
        shell.waiter("fit of client 8", "alone", count=2)
        asks = client(shell, folder)
        # The run alone, and the whole line: what others wait for is before what it asks. In the ledger that
        # waits a moment before its run's trace says so.
        told = look_until(shell, lambda told: any(row["run"] for row in told["waiting"]), str(folder))
        first, second = told["waiting"]
        assert (first["label"], first["run"]) == ("fit of client 8", "")
        assert (second["run"], second["pid"], second["label"]) == (
            "run", asks.pid, "train of client 7",
        )  # fmt: skip
        assert second["asked_bytes"] == 4 * GIB
        asks.kill()
        folder.joinpath("go-on").touch()
        assert ends.wait(60) == 0
        told = look(shell)
        assert not any(row["run"] for row in told["workers"])
        assert told["runs"][0]["calls_done"] == {}  # it was of no round
    assert look(shell)["runs"] == []


def test_a_ledger_that_is_held_is_told_and_the_rest_is_shown(shell: Shell, host: Host) -> None:
    shell.on(host)("leases")  # makes it
    with open(shell.ledger / "flower-gpu-leases.mutex") as mutex:
        fcntl.flock(mutex, fcntl.LOCK_EX)
        told = look(shell)
    assert "has been locked for 1 s by process" in told["ledger_problem"]
    assert [gpu["capacity_bytes"] for gpu in told["gpus"]] == [None, None]
    assert told["gpus"][0]["total_bytes"] == 16 * GIB


def test_without_a_terminal_it_is_one_look_and_a_hint(shell: Shell, host: Host) -> None:
    shell.on(host).holder("fit of client é", "0.5")
    # An output that knows few letters gets these.
    done = shell.run("top", env={"PYTHONIOENCODING": "ascii", "COLUMNS": "120"})
    assert (done.returncode, done.stdout.splitlines()[0].split()[:2]) == (0, ["flower-gpu", "top"])
    assert done.stderr.count("\n") == 1
    assert "--once" in done.stderr
    assert done.stdout.count("Waiting") == 1
    assert "fit of client ?" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("nowhere",), "nowhere is not the folder of a run"),
        (("--interval", "0"), "--interval: must be a number of seconds, 0.1 to 1e+09, not '0'"),
    ],
)
def test_bad_input_is_one_line(
    arguments: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status: object = cli.main(["top", *arguments])
    except SystemExit as ended:  # as argparse does
        status = ended.code
    assert status == 2
    errors = capsys.readouterr().err
    assert told in errors
    assert errors.count("\n") == 1
