"""`flower-gpu leases` shows processes that hold leases and processes that wait for leases."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from command_shell import Shell
from nvml_stub import GIB, Host

PAGE = Path(__file__).parents[2] / "docs/reference/commands.md"
CAPACITY = 16 * GIB - 256 * 2**20


def parsed(shell: Shell) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(shell("leases", "--json"))
    return report


def steady(text: str) -> str:
    """Replace pids, cores and times, which differ in each run, by fixed values."""
    text = re.sub(r"pid \d+", "pid 1234", text)
    text = re.sub(r"^Cores .*? leased\n(?=waiting)", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"\d+ s$", "5 s", text, flags=re.MULTILINE)


def test_text_and_json_match_the_documentation(shell: Shell, host: Host) -> None:
    shell.on(host)
    host.program(0, 2 * GIB)
    shell.holder("fit of client 0", "0.25")
    shell.holder("fit of client 1", 6 * GIB)
    shell.holder("fit of client 2", 4 * GIB)
    shell.waiter("evaluate on the server", "alone")
    shell.waiter("fit of client 3", "1.0", count=2)
    shell.waiter("fit of client 4", 12 * GIB)
    (documented_text,) = re.findall(r"```text\n(GPU 0.*?)```", PAGE.read_text(), re.DOTALL)
    assert steady(shell("leases")) == steady(documented_text)
    report = parsed(shell)
    assert report["ledger"] == str(shell.ledger)
    assert [gpu["uuid"] for gpu in report["gpus"]] == host.uuids
    assert [gpu["capacity_bytes"] for gpu in report["gpus"]] == [CAPACITY - 2 * GIB, CAPACITY]
    assert [holder["label"] for holder in report["holders"]] == [f"fit of client {n}" for n in range(3)]
    waiting = [(waiter["label"], waiter["count"]) for waiter in report["waiting"]]
    assert waiting == [("evaluate on the server", 1), ("fit of client 3", 2), ("fit of client 4", 1)]
    for gpu in report["gpus"]:
        parts = [part for holder in report["holders"] for part in holder["parts"]]
        on_this_gpu = [part["memory_bytes"] for part in parts if part["uuid"] == gpu["uuid"]]
        assert sum(on_this_gpu) == gpu["leased_bytes"] <= gpu["capacity_bytes"]
    page = PAGE.read_text().partition("\n## flower-gpu leases\n")[2].partition("\n## ")[0]
    documented = re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)
    keys = [*report, *report["gpus"][0], *report["holders"][0], *report["waiting"][0]]
    assert documented == list(dict.fromkeys(keys))


def test_a_killed_holder_disappears_at_once_and_lost_gpus_are_shown(shell: Shell, host: Host) -> None:
    assert shell("leases").startswith("no usable GPU: no NVIDIA driver here: libnvidia-ml.so.1 is missing")
    killed = shell.on(host).holder("fit of client 0", "0.5")
    killed.kill()
    killed.wait()
    assert steady(shell("leases")).splitlines() == [
        "GPU 0  NVIDIA Stub 16GB  0 B of 15.8 GiB leased (0 %)",
        "GPU 1  NVIDIA Stub 16GB  0 B of 15.8 GiB leased (0 %)",
        "waiting: nobody",
    ]
    shell.holder("fit of client \x1b[2J\n7", "1.0", count=2)
    host.set(0, lost=True)
    host.set(1, lost=True)
    text = shell("leases")
    assert f"{host.uuids[0]}, not usable now" in text
    assert text.count("fit of client ?[2J?7 (pid") == 2
