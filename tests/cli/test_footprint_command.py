"""``flower-gpu footprint``."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import pytest

from flower_gpu.cli import footprint as command
from flower_gpu.leases.footprint import Footprints
from flower_gpu.leases.footprint_rule import Key, needed_bytes

GIB, MIB = 1 << 30, 1 << 20
TRAIN = Key("task:train", "11.2M parameters f32 ab12cd34", "NVIDIA Stub 16GB", (("batch-size", 32),))
SAME_TASK = Key("task:train", "11.2M parameters f32 ab12cd34", "NVIDIA Stub 16GB", (("batch-size", 64),))
EVALUATE = Key("task:evaluate", "11.2M parameters f32 ab12cd34", "NVIDIA Stub 16GB")

COMMANDS = (Path(__file__).parents[2] / "docs/reference/commands.md").read_text()
REFERENCE = COMMANDS.partition("\n## flower-gpu footprint\n")[2].partition("\n## ")[0]


@pytest.fixture(autouse=True)
def state_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLOWER_GPU_STATE_DIR", str(tmp_path / "state"))
    return tmp_path / "state"


@pytest.fixture
def learned(state_dir: Path) -> Footprints:
    footprints = Footprints()
    for key, peak in ((TRAIN, 2 * GIB), (TRAIN, GIB), (SAME_TASK, 4 * GIB), (EVALUATE, 100 * MIB)):
        footprints.learn(key, peak)
    footprints.learn_context("NVIDIA Stub 16GB", 400 * MIB)
    return footprints


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    command.COMMAND.add_arguments(parser)
    return command.run(parser.parse_args(arguments))


def test_no_footprint_was_learned_yet(capsys: pytest.CaptureFixture[str], state_dir: Path) -> None:
    assert run() == 0
    printed = capsys.readouterr()
    assert printed.out == "" and "no footprint has been learned yet" in printed.err
    assert not state_dir.exists()
    assert run("--json") == 0
    assert json.loads(capsys.readouterr().out) == {"footprints": [], "contexts": []}


def test_tables_and_json_match_the_reference(learned: Footprints, capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == 0
    footprints, contexts = capsys.readouterr().out.rstrip("\n").split("\n\n")
    head, *rows = [re.split(r" {2,}", line) for line in footprints.splitlines()]
    same = ["11.2M parameters f32 ab12cd34", "NVIDIA Stub 16GB"]
    assert [row[:-1] for row in rows] == [
        ["task:train", *same, "batch-size=32", "2.0 GiB", "2.2 GiB", "2 times"],
        ["task:train", *same, "batch-size=64", "4.0 GiB", "4.4 GiB", "once"],
        ["task:evaluate", *same, "-", "100 MiB", "164 MiB", "once"],
    ]
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d", row[-1]) for row in rows)
    context_head, row = [re.split(r" {2,}", line) for line in contexts.splitlines()]
    assert context_head == ["CUDA CONTEXT ON", "SIZE", "MEASURED", "LAST"]
    assert row[:-1] == ["NVIDIA Stub 16GB", "400 MiB", "once"]
    assert run("--json") == 0
    printed = json.loads(capsys.readouterr().out)
    first = printed["footprints"][0]
    assert first == {
        "task": "task:train",
        "weights": "11.2M parameters f32 ab12cd34",
        "gpu": "NVIDIA Stub 16GB",
        "sizes": {"batch-size": 32},
        "peak_bytes": 2 * GIB,
        "needed_bytes": needed_bytes(2 * GIB),
        "last_bytes": GIB,
        "measured": 2,
        "updated_s": learned.entries()[TRAIN].updated_s,
    }
    (context,) = printed["contexts"]
    assert context["gpu"] == "NVIDIA Stub 16GB" and context["context_bytes"] == 400 * MIB
    documented = re.findall(r"^\| (?:`(.*)`)? ?\| `(\w+)` \|", REFERENCE, re.MULTILINE)
    assert [column for column, _ in documented if column] == head
    assert {key for _, key in documented} == set(first)


@pytest.mark.parametrize(
    ("arguments", "code", "remaining"),
    [
        ((), 0, set()),
        (("--task", "task:train"), 0, {EVALUATE}),
        (("--task", "task:evaluate"), 0, {TRAIN, SAME_TASK}),
        (("--task", "task:other"), 1, {TRAIN, SAME_TASK, EVALUATE}),
    ],
)
def test_clear_removes_the_footprints_of_one_task_or_all(
    learned: Footprints,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    code: int,
    remaining: set[Key],
) -> None:
    assert run("clear", *arguments) == code
    assert set(Footprints().entries()) == remaining
    assert bool(Footprints().contexts()) == bool(arguments)
    printed = capsys.readouterr()
    removed = 3 - len(remaining)
    assert printed.out == f"forgot {removed} footprint{'' if removed == 1 else 's'}\n"
    if code:
        assert printed.err == (
            "no footprint of the task task:other; there are footprints of task:evaluate, task:train\n"
        )
