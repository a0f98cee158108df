"""The output of `flower-gpu gpus`."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import nvml_stub
import pytest
from nvml_stub import GIB, Host
from run_programs import run_python

MIB = 2**20

COMMANDS = (Path(__file__).parents[2] / "docs/reference/commands.md").read_text()
PAGE = COMMANDS.partition("\n## flower-gpu gpus\n")[2].partition("\n## ")[0]

COMMAND = """
import sys
from flower_gpu.cli.main import main
codes = main(["gpus"]), print("-----"), main(["gpus", "--json"])
heavy = {"torch", "flwr", "numpy"} & set(sys.modules)
assert not heavy, heavy
sys.exit(max(codes[::2]))
"""


def command_output(env: dict[str, str]) -> tuple[str, dict[str, Any]]:
    """Return the output of the command without and with --json. It must succeed, with an empty stderr."""
    plain = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    completed = run_python(COMMAND, env={**plain, **env})
    assert (completed.returncode, completed.stderr) == (0, "")
    text, _, json_text = completed.stdout.partition("-----\n")
    return text, json.loads(json_text)


@pytest.fixture
def mixed(tmp_path: Path) -> Host:
    """A host with four GPUs: one in use, one lost, one in MIG mode, and one that lists no processes."""
    host = Host(tmp_path / "host", gpus=4, reserved=400 * MIB)
    host.set(0, util=37)
    host.program(0, 2 * GIB, pid=7_000_000, name="/usr/bin/python3")
    host.program(0, 341 * MIB, pid=7_000_001, name="/usr/lib/xorg/Xorg", graphics=True)
    host.set(1, lost=True)
    host.set(2, name="NVIDIA A100-SXM4-40GB", total=40 * GIB)
    host.mig(2, [5 * GIB, 10 * GIB])
    for version in ("v2", "v3"):
        host.fail(f"nvmlDeviceGetComputeRunningProcesses_{version}", nvml_stub.NO_PERMISSION, index=3)
    return host


def test_the_table_fits_a_terminal(mixed: Host) -> None:
    mixed.set(
        3, name="NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", total=999 * GIB, used=998 * GIB
    )
    lines = command_output(mixed.env)[0].splitlines()
    assert max(map(len, lines)) <= 80
    assert any("998.0 of 999.0 GiB" in line for line in lines)


def test_the_table_and_the_json_match_the_documentation(mixed: Host) -> None:
    text, report = command_output({**mixed.env, "CUDA_VISIBLE_DEVICES": "2,0"})
    assert [text] == re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
    assert {key: value for key, value in report.items() if key != "gpus"} == {
        "driver_version": "550.54.14",
        "problem": None,
        "cuda_visible_devices": "2,0",
        "cap": "GPU cap: by the frameworks' allocators (not by the driver: "
        "drivers before 615 do not support limits of control groups)",
    }
    first, lost, card, instance, _, last = report["gpus"]
    assert re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE) == [*report, *first], "every key is documented"
    assert first == {
        "index": 0,
        "uuid": mixed.uuids[0],
        "name": "NVIDIA Stub 16GB",
        "mig_parent": None,
        "usable": True,
        "visible": True,
        "problem": None,
        "total_bytes": 16 * GIB,
        "used_bytes": 2 * GIB + 341 * MIB,
        "free_bytes": 14 * GIB - 741 * MIB,
        "reserved_bytes": 400 * MIB,
        "limited_by": None,
        "utilization_percent": 37,
        "processes": [
            {"pid": 7_000_000, "name": "/usr/bin/python3", "used_bytes": 2 * GIB},
            {"pid": 7_000_001, "name": "/usr/lib/xorg/Xorg", "used_bytes": 341 * MIB},
        ],
    }
    assert set(lost) == set(first)
    known_keys = [key for key, value in lost.items() if value is not None]
    assert sorted(known_keys) == ["index", "problem", "usable", "visible"]
    assert (card["usable"], card["visible"]) == (False, False)
    assert (instance["usable"], instance["visible"], instance["mig_parent"]) == (True, True, mixed.uuids[2])
    assert (last["usable"], last["visible"], last["processes"]) == (True, False, None)


def test_unknown_memory_and_name_of_a_process_are_shown_as_unknown(host: Host) -> None:
    host.program(0, GIB, pid=7_000_000)
    host.set(0, hidden=1)
    host.fail("nvmlSystemGetProcessName", 6)
    text, report = command_output(host.env)
    assert "   unknown  pid 7000000  (no such process here)\n" in text
    assert report["gpus"][0]["processes"] == [{"pid": 7_000_000, "name": None, "used_bytes": None}]


def test_a_name_cannot_write_to_the_terminal(host: Host) -> None:
    host.program(0, GIB, pid=7_000_000, name="/bin/\x1b]0;title\x07evil")
    text, _ = command_output({**host.env, "CUDA_VISIBLE_DEVICES": "\x1b[2J"})
    assert "?]0;title?evil" in text
    assert "\x1b" not in text


def test_an_old_driver_does_not_report_reserved_memory(tmp_path: Path) -> None:
    host = Host(tmp_path / "old", gpus=1, reserved=512 * MIB, driver="470.199.02")
    text, report = command_output(host.env)
    assert report["gpus"][0]["reserved_bytes"] is None and "reserves" not in text


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "CUDA_VISIBLE_DEVICES is not set: all are visible."),
        ("", "CUDA_VISIBLE_DEVICES= hides them all."),
        ("7", "CUDA_VISIBLE_DEVICES=7 hides them all."),
        ("1", "CUDA_VISIBLE_DEVICES=1 leaves 1 visible."),
    ],
)
def test_the_output_says_which_gpus_the_variable_hides(host: Host, value: str | None, words: str) -> None:
    text, _ = command_output({**host.env, **({} if value is None else {"CUDA_VISIBLE_DEVICES": value})})
    assert words in " ".join(text.split())


def test_the_output_says_why_there_is_no_gpu(host: Host) -> None:
    host.fail_init(nvml_stub.LIB_RM_VERSION_MISMATCH)
    text, report = command_output(host.env)
    reason = "the NVIDIA driver's library and its kernel module are of different\nversions"
    assert text.startswith(f"No GPU: {reason}")
    assert report["gpus"] == [] and "restart the machine" in report["problem"]
    host.fail_init(0)
    host.set_count(0)
    reason = "the NVIDIA driver runs but shows no GPU"
    assert command_output(host.env)[0].startswith(f"NVIDIA driver 550.54.14\nNo GPU: {reason}")
