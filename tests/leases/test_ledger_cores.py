"""Cores and main memory in the ledger, with real processes."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import pytest
from ledger_hosts import LedgerHost, RefusedError
from nvml_stub import GIB

from flower_gpu import control_group
from flower_gpu.leases import host

ALL = 1000 * control_group.all_cores()


def cores(amount: int, **fields: Any) -> dict[str, Any]:
    return {"cores": amount, "count": 0, **fields}


def test_cores_are_leased_first_come_first_served_and_back_when_a_holder_is_killed(
    ledger_host: LedgerHost,
) -> None:
    one, two, three = ledger_host.start(3)
    assert one("acquire", **cores(ALL)) == {"cores": ALL}
    assert ledger_host.status()["host"]["cores"] == [ALL, ALL]
    ledger_host.line_up((two, cores(ALL // 2)), (three, cores(ALL)))
    os.kill(one.pid, signal.SIGKILL)
    assert two.answer() == {"cores": ALL // 2}
    assert three.pid in ledger_host.status()["waiting"]
    two("release")
    assert three.answer() == {"cores": ALL}
    three("release")
    # Who asks for all that is free never waits.
    assert two("acquire", **cores(ALL - 300)) == {"cores": ALL - 300}
    assert three("acquire", **cores(ALL, least_cores=0)) == {"cores": 300}


def test_a_gpu_and_cores_are_one_ticket(one_gpu: LedgerHost) -> None:
    """While its cores are not free it holds no GPU, and nobody gets that one meanwhile."""
    busy, both, other = one_gpu.start(3)
    busy("acquire", **cores(ALL))
    [uuid] = one_gpu.stub.uuids
    one_gpu.line_up((both, {"memory": 10 * GIB, "cores": ALL // 2}), (other, {"memory": 10 * GIB}))
    assert one_gpu.status()["leased"] == {uuid: 0}
    busy("release")
    assert both.answer() == {uuid: 10 * GIB, "cores": ALL // 2}
    both("release")
    assert other.answer() == {uuid: 10 * GIB}


def test_a_wait_that_ends_says_who_holds_the_cores(ledger_host: LedgerHost) -> None:
    one, two = ledger_host.start(2)
    one("acquire", **cores(ALL, label="fit of client 7"))
    with pytest.raises(RefusedError) as refused:
        two("acquire", timeout_s=0.2, **cores(1000))
    assert refused.value.kind == "LeaseTimeoutError"
    assert "held by fit of client 7" in refused.value.message
    assert "core" in refused.value.message


def test_calls_of_a_task_that_wait_for_each_other_begin_one_after_the_other(ledger_host: LedgerHost) -> None:
    """Nobody has measured what they take. What one takes after some seconds is what it needs."""
    one, two = ledger_host.start(2)
    one("acquire", **cores(0, guess=GIB))
    [path] = ledger_host.own.glob("*.ticket")
    ledger_host.line_up((two, cores(0, guess=GIB)))
    text = path.read_bytes().partition(b"\n")[0]
    ticket = json.loads(text)
    ticket["since"] -= host.SETTLED_S
    earlier = json.dumps(ticket).encode()
    assert len(earlier) <= len(text)
    with path.open("r+b") as file:
        file.write(earlier + b"\n")
    assert two.answer()
    assert sorted(ledger_host.status()["holders"]) == sorted([one.pid, two.pid])
