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


def core_claim(amount: int, **fields: Any) -> dict[str, Any]:
    return {"cores": amount, "count": 0, **fields}


def test_cores_are_leased_in_order_and_freed_when_a_holder_is_killed(
    ledger_host: LedgerHost,
) -> None:
    first, second, third = ledger_host.start(3)
    assert first("acquire", **core_claim(ALL)) == {"cores": ALL}
    assert ledger_host.status()["host"]["cores"] == [ALL, ALL]
    ledger_host.line_up((second, core_claim(ALL // 2)), (third, core_claim(ALL)))
    os.kill(first.pid, signal.SIGKILL)
    assert second.answer() == {"cores": ALL // 2}
    assert third.pid in ledger_host.status()["waiting"]
    second("release")
    assert third.answer() == {"cores": ALL}
    third("release")
    # A claim for as many cores as are free never waits.
    assert second("acquire", **core_claim(ALL - 300)) == {"cores": ALL - 300}
    assert third("acquire", **core_claim(ALL, least_cores=0)) == {"cores": 300}


def test_a_claim_for_a_gpu_and_cores_gets_both_together(one_gpu: LedgerHost) -> None:
    """While a claim waits for its cores, it holds no GPU, but its GPU is reserved for it."""
    busy, both, other = one_gpu.start(3)
    busy("acquire", **core_claim(ALL))
    [uuid] = one_gpu.stub.uuids
    one_gpu.line_up((both, {"memory": 10 * GIB, "cores": ALL // 2}), (other, {"memory": 10 * GIB}))
    assert one_gpu.status()["leased"] == {uuid: 0}
    busy("release")
    assert both.answer() == {uuid: 10 * GIB, "cores": ALL // 2}
    both("release")
    assert other.answer() == {uuid: 10 * GIB}


def test_a_claim_that_times_out_names_the_holder_of_the_cores(ledger_host: LedgerHost) -> None:
    holder, waiter = ledger_host.start(2)
    holder("acquire", **core_claim(ALL, label="fit of client 7"))
    with pytest.raises(RefusedError) as refused:
        waiter("acquire", timeout_s=0.2, **core_claim(1000))
    assert refused.value.kind == "LeaseTimeoutError"
    assert "held by fit of client 7" in refused.value.message
    assert "core" in refused.value.message


def test_calls_of_an_unmeasured_task_begin_one_after_the_other(ledger_host: LedgerHost) -> None:
    """Their need was never measured. The use of the first call after some seconds is taken as its need."""
    first, second = ledger_host.start(2)
    first("acquire", **core_claim(0, guess=GIB))
    [path] = ledger_host.account_folder.glob("*.ticket")
    ledger_host.line_up((second, core_claim(0, guess=GIB)))
    text = path.read_bytes().partition(b"\n")[0]
    ticket = json.loads(text)
    ticket["since"] -= host.SETTLED_S
    settled = json.dumps(ticket).encode()
    assert len(settled) <= len(text)
    with path.open("r+b") as file:
        file.write(settled + b"\n")
    assert second.answer()
    assert sorted(ledger_host.status()["holders"]) == sorted([first.pid, second.pid])
