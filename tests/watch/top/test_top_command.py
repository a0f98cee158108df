"""`flower-gpu top` lists the GPUs, runs, workers and waiting claims of a host."""

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
from command_shell import Shell
from nvml_stub import GIB, Host
from top_traces import run_of
from waiting import until

from flower_gpu.cli import main as cli

WATCH, TESTS, REPOSITORY = [*Path(__file__).parents][1:4]
PAGE = REPOSITORY / "docs/reference/top.md"
RESERVE = 256 * 2**20


def top_json(shell: Shell, *arguments: str) -> dict[str, Any]:
    output: dict[str, Any] = json.loads(shell("top", "--json", *arguments))
    return output


def wait_for_top(
    shell: Shell, condition: Callable[[dict[str, Any]], bool], *arguments: str
) -> dict[str, Any]:
    """Repeat `flower-gpu top --json` until its output meets the condition."""
    return until(lambda: output if condition(output := top_json(shell, *arguments)) else {})


def client(shell: Shell, folder: Path) -> subprocess.Popen[str]:
    """Start a client with a call that runs until the file "go-on" exists."""
    env = {
        "FLOWER_GPU_RUN_DIR": str(folder),
        "PYTHONPATH": f"{WATCH}:{TESTS}:{REPOSITORY}",
    }
    return shell.start(sys.executable, str(WATCH / "top_client.py"), str(folder), env=env)


def test_gpus_leases_and_the_order_of_waiting_claims(shell: Shell, host: Host, tmp_path: Path) -> None:
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
        view = top_json(shell)
    first, second = view["gpus"]
    assert (first["index"], first["uuid"]) == (0, host.uuids[0])
    assert (first["total_bytes"], first["used_bytes"]) == (16 * GIB, 2 * GIB)
    assert (first["utilization_percent"], first["temperature_c"]) == (35, 61)
    assert (first["programs_bytes"], second["programs_bytes"]) == (2 * GIB, 0)
    assert first["capacity_bytes"] == 14 * GIB - RESERVE
    assert first["own_leased_bytes"] == second["own_leased_bytes"] == 12 * GIB
    assert {gpu["other_leased_bytes"] for gpu in (first, second)} == {0}
    (worker,) = view["workers"]
    assert (worker["label"], worker["phase"], worker["pid"]) == ("fit of client 0", "held", holder.pid)
    assert (worker["gpus"], worker["lease_bytes"], worker["user"]) == ([0, 1], 24 * GIB, view["account"])
    assert (worker["used_bytes"], worker["run"]) == (None, "")
    assert [row["pid"] for row in view["waiting"]] == [waiter.pid for waiter in waiters]
    needs = [[row[f"asked_{field}"] for field in ("bytes", "share", "alone")] for row in view["waiting"]]
    assert needs == [[None, None, True], [None, 1.0, False], [12 * GIB, None, False]]
    assert [row["count"] for row in view["waiting"]] == [1, 2, 1]
    # Runs with the same name are distinguished by their folder.
    first_run, second_run = view["runs"]
    assert first_run["run"].startswith("quickstart:") and first_run["folder"] != second_run["folder"]
    # Every key is documented.
    keys = [list(view), *(list(view[part][0]) for part in ("gpus", "runs", "workers", "waiting"))]
    keys.append(list(view["resources"]))
    assert view["resources"]["cores_leased"] == 0 < view["resources"]["cores"]
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


def test_a_worker_with_its_progress_and_memory(shell: Shell, host: Host, tmp_path: Path) -> None:
    shell.on(host)
    folder = tmp_path / "run"
    with run_of(shell, folder):
        finishing = client(shell, folder)

        def is_in_the_middle(view: dict[str, Any]) -> bool:
            rows = view["workers"]
            return bool(rows) and rows[0]["progress_done"] == 13 and bool(rows[0]["used_bytes"])

        view = wait_for_top(shell, is_in_the_middle)
        (run,), (row,) = view["runs"], view["workers"]
        assert (run["run"], run["kind"], run["folder"]) == ("quickstart", "launch", str(folder))
        assert (row["run"], row["client"], row["task"]) == ("quickstart", "7", "train")
        assert (row["phase"], row["progress"], row["progress_total"]) == ("running", "epoch \x1b[2J1", 40)
        assert (row["lease_bytes"], row["used_bytes"]) == (4 * GIB, GIB)
        (gpu,) = [gpu for gpu in view["gpus"] if gpu["own_leased_bytes"]]
        assert row["gpus"] == [gpu["index"]]
        assert (gpu["own_used_bytes"], gpu["programs_bytes"]) == (GIB, 0)
        text = shell("top", "--once", env={"COLUMNS": "120"})
        assert re.search(r"quickstart +7 +train .* 4\.0 +1\.0 .* running epoch \?\[2J1 13/40", text)
        shell.waiter("fit of client 8", "alone", count=2)
        asking = client(shell, folder)
        # The view of one run still shows the whole queue, because earlier claims come before the run's claim.
        # The claim is in the ledger a moment before the trace of its run reports it.
        view = wait_for_top(shell, lambda view: any(row["run"] for row in view["waiting"]), str(folder))
        first, second = view["waiting"]
        assert (first["label"], first["run"]) == ("fit of client 8", "")
        assert (second["run"], second["pid"], second["label"]) == (
            "run", asking.pid, "train of client 7",
        )  # fmt: skip
        assert second["asked_bytes"] == 4 * GIB
        asking.kill()
        folder.joinpath("go-on").touch()
        assert finishing.wait(60) == 0
        view = top_json(shell)
        assert not any(row["run"] for row in view["workers"])
        # The call did not belong to a round.
        assert view["runs"][0]["calls_done"] == {}
    assert top_json(shell)["runs"] == []


def test_a_locked_ledger_is_reported_and_the_rest_is_shown(shell: Shell, host: Host) -> None:
    # The first command creates the ledger.
    shell.on(host)("leases")
    with open(shell.ledger / "flower-gpu-leases.mutex") as mutex:
        fcntl.flock(mutex, fcntl.LOCK_EX)
        view = top_json(shell)
    assert "has been locked for 1 s by process" in view["ledger_problem"]
    assert [gpu["capacity_bytes"] for gpu in view["gpus"]] == [None, None]
    assert view["gpus"][0]["total_bytes"] == 16 * GIB


def test_without_a_terminal_one_view_and_a_hint_are_printed(shell: Shell, host: Host) -> None:
    shell.on(host).holder("fit of client é", "0.5")
    # An ASCII output gets ASCII characters only.
    done = shell.run("top", env={"PYTHONIOENCODING": "ascii", "COLUMNS": "120"})
    assert (done.returncode, done.stdout.splitlines()[0].split()[:2]) == (0, ["flower-gpu", "top"])
    assert done.stderr.count("\n") == 1
    assert "--once" in done.stderr
    assert done.stdout.count("Waiting") == 1
    assert "fit of client ?" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere",), "nowhere is not the folder of a run"),
        (("--interval", "0"), "--interval: must be a number of seconds, 0.1 to 1e+09, not '0'"),
    ],
)
def test_bad_input_is_an_error_of_one_line(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status: object = cli.main(["top", *arguments])
    except SystemExit as exit_:  # raised by argparse
        status = exit_.code
    assert status == 2
    errors = capsys.readouterr().err
    assert message in errors
    assert errors.count("\n") == 1
