"""Stub hosts with a ledger."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from ledger_hosts import LedgerHost


@pytest.fixture
def ledger_host(tmp_path: Path) -> Iterator[LedgerHost]:
    host = LedgerHost(tmp_path)
    yield host
    host.close()


@pytest.fixture
def one_gpu(tmp_path: Path) -> Iterator[LedgerHost]:
    host = LedgerHost(tmp_path, gpus=1)
    yield host
    host.close()
