"""Fixtures for a shell and a host with stub GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cli.command_shell import Shell
from nvml_stub import Host


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    """A shell on a machine without GPUs."""
    shell = Shell(tmp_path)
    yield shell
    shell.end()


@pytest.fixture
def host(tmp_path: Path) -> Host:
    """A host with two stub GPUs of 16 GiB."""
    return Host(tmp_path / "host")
