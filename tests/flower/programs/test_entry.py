"""What a command of Flower's name runs, by where it is found."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from flower_gpu.flower.commands import COMMANDS, SERVER_COMMANDS, CommandFolder
from flower_gpu.flower.programs.server import NoEntryError, find
from flower_gpu.workers.forkserver.identity import script_folders

FLOWERS = os.pathsep.join(script_folders())


@pytest.mark.parametrize("name", ["flower-superlink", "flower-supernode", "flower-superexec", "flwr"])
def test_flowers_own(name: str) -> None:
    found = find(name, {"PATH": FLOWERS})
    assert found.module.startswith("flwr.") and Path(found.path).name == name
    assert callable(found.load())


@pytest.mark.parametrize(
    ("commands", "name"), [(COMMANDS, "flower-supernode"), (SERVER_COMMANDS, "flwr-serverapp")]
)
def test_ours(commands: dict[str, str], name: str) -> None:
    found = find(name, {"PATH": CommandFolder(commands).first_on(FLOWERS)})
    assert (found.module, found.function) == (commands[name], "main")


def test_one_of_another_environment(tmp_path: Path) -> None:
    other = tmp_path / "flower-supernode"
    other.write_text("#!/bin/sh\n")
    other.chmod(0o755)
    with pytest.raises(NoEntryError, match=r"flower-supernode is another program"):
        find("flower-supernode", {"PATH": f"{tmp_path}{os.pathsep}{FLOWERS}"})


def test_one_that_is_not_flowers() -> None:
    with pytest.raises(NoEntryError, match="another program"):
        find("python", {"PATH": FLOWERS})
    with pytest.raises(NoEntryError, match="no command flower-supernode"):
        find("flower-supernode", {"PATH": ""})
