"""A reused worker returns its result without waiting for its last query of the driver."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cuda_stub
import pytest
from waiting import until

pytestmark = pytest.mark.timeout(180)

TESTS = Path(__file__).parents[1]
CONTEXT_BYTES = 450 << 20
LOOK = "nvmlDeviceGetHandleByUUID"


def test_a_later_result_does_not_wait_for_the_last_look(cuda_host: Callable[..., cuda_stub.Host]) -> None:
    host = cuda_host(gpus=2, context=CONTEXT_BYTES)
    folders = [TESTS, TESTS / "workers", TESTS / "calls"]
    process = subprocess.Popen(
        [sys.executable, str(TESTS / "calls" / "last_look_tasks.py"), host.uuids[1]],
        env={**os.environ, **host.env, "PYTHONPATH": os.pathsep.join(map(str, folders))},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def call(*arguments: float) -> tuple[int, dict[str, Any]]:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(f"{json.dumps(arguments)}\n")
        process.stdin.flush()
        pid, figures = json.loads(process.stdout.readline())
        return pid, figures

    with process:
        host.count_calls()
        pid, first = call(1000.0)
        assert first["context_bytes"] == CONTEXT_BYTES
        looks = host.calls()[pid]
        assert looks[LOOK] >= 1
        assert not [name for name in looks if "ByIndex" in name or "GetCount" in name]
        host.hang(LOOK, pid)
        assert call() == (pid, first | {"reserved_before_bytes": 32 << 20})
        until(lambda: host.hanging() == {pid})
        host.go_on()
        until(lambda: host.calls()[pid][LOOK] > looks[LOOK])
        process.communicate(timeout=60)
    assert process.returncode == 0
