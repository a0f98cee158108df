"""The list of Flower's private names matches the installed Flower. CI tests the oldest and newest one."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from flower_gpu.doctor import environment
from flower_gpu.flower import private_names
from flower_gpu.programs.waits import call_after


def test_the_installed_flower_has_all_private_names() -> None:
    assert private_names.lacking() == {}


def test_a_missing_name_is_logged_once_and_reported_by_doctor(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    name = f"{private_names.NODE_STATE}.create_no_task"
    monkeypatch.setitem(private_names.NAMES, name, "it waits")
    with caplog.at_level(logging.DEBUG, "flwr.flower_gpu"):
        for _ in range(2):
            assert not call_after(private_names.NODE_STATE, "create_no_task", lambda: None)
    [line] = [record.getMessage() for record in caplog.records if record.name == "flwr.flower_gpu"]
    assert re.fullmatch(r"flwr\S* \S+ has no flwr\.supernode\.\S+\.create_no_task: it waits", line)
    monkeypatch.setattr(environment, "_lacking", private_names.lacking)  # in this process
    rows = list(environment._private_names())
    assert rows[0][0] == "ok" and rows[1:] == [("note", f"Flower has no {name.replace(':', '.')}: it waits")]


def test_doctor_reports_that_flower_cannot_be_imported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "flwr").mkdir()
    (tmp_path / "flwr" / "__init__.py").write_text("raise ImportError('half of it is there')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    [(level, text, _)] = environment._private_names()
    assert (level, text) == ("problem", "Flower cannot be imported")
