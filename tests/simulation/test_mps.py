"""Workers of a run that share a card by MPS: real PyTorch on stand-ins for CUDA and the daemon."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cuda_stub
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shared_servers import SHARED_STATE
from waiting import until

from flower_gpu import trace
from flower_gpu.calls.grants import mps
from flower_gpu.leases.lease import Lease

pytestmark = pytest.mark.timeout(400)

EXCLUSIVE_PROCESS = 3
SHARES = {"mps": True, "num_gpus": 0.25}


class Host:
    """A host with a single card, and with the daemon's program on PATH."""

    def __init__(self, cards: cuda_stub.Host, folder: Path) -> None:
        self.cards, self.folder = cards, folder
        path = f"{Path(cuda_stub.__file__).parent / 'mps'}:{os.environ['PATH']}"
        self.env = {**os.environ, **cards.env, **SHARED_STATE, "PATH": path}

    def start(self, *runs: dict[str, Any], **env: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("mps_run.py"))],
            env={**self.env, **env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdin is not None
        process.stdin.write("".join(f"{json.dumps({'log_dir': None, **run})}\n" for run in runs))
        process.stdin.close()
        return process

    def lines(self, *runs: dict[str, Any], **env: str) -> list[Any]:
        with self.start(*runs, **env) as process:
            assert process.stdout is not None
            return [json.loads(line) for line in process.stdout if line.startswith("[")]

    def config(self, name: str, rounds: str) -> dict[str, Any]:
        return {"run_config": {"rounds": rounds, "folder": str(self.folder / name)}}


@pytest.fixture
def host(cuda_host: Callable[..., cuda_stub.Host], tmp_path: Path) -> Iterator[Host]:
    yield Host(cuda_host(gpus=1), tmp_path)


def test_workers_have_their_share_of_a_card_and_a_fault_fails_the_calls_in_flight(host: Host) -> None:
    """The card allows a single process, the MPS server. The round after a fault has new workers."""
    host.cards.set(0, compute_mode=EXCLUSIVE_PROCESS)
    logs = host.folder / "runs"
    first = {**SHARES, **host.config("first", "plain plain fault plain"), "log_dir": str(logs)}
    second = {**SHARES, **host.config("second", "plain"), "clients": {"1": {"gpu-compute": 0.1}}}
    elsewhere = {"env": {"CUDA_MPS_PIPE_DIRECTORY": "/nowhere"}, "keep_going": True}
    no_client = {**SHARES, **host.config("third", "plain"), **elsewhere}
    original, used_again, faulted, after, small, refused = host.lines(first, second, no_client)
    assert [worker["sms"] for worker in original] == [32, 32], "25 % of 132, by pairs"
    assert [worker["is_capped"] for worker in original] == [1, 1], (
        "4 GiB and a context are more than the lease"
    )
    assert {worker["pid"] for worker in used_again} == {worker["pid"] for worker in original}
    assert len(faulted) == 2
    for reason in faulted:
        assert "a fault on GPU 0 has ended all calls" in reason and "illegal memory access" in reason
    assert not {worker["pid"] for worker in after} & {worker["pid"] for worker in original}
    assert [worker["sms"] for worker in after] == [32, 32]
    assert sorted(worker["sms"] for worker in small) == [12, 32]
    for reason in refused:
        assert "25 % of the processors" in reason and "132 of 132" in reason
        assert "the call was not run" in reason
    [run] = logs.iterdir()
    started = [event for event in trace.read(run / trace.FILE_NAME) if event["event"] == "worker_started"]
    assert {event["mps_percentage"] for event in started} == {25}
    assert host.cards.uuids[0] in (run / "mps" / "control.log").read_text()


def test_a_killed_run_leaves_no_daemon(host: Host) -> None:
    with host.start({**SHARES, **host.config("run", "waits")}) as process:
        assert process.stdout is not None
        pipes = Path(next(line for line in process.stdout if "-mps-" in line).strip().rpartition(" ")[2])
        daemon = int((pipes / "nvidia-cuda-mps-control.pid").read_text())
        process.kill()
    until(lambda: not pipes.exists() and not Path(f"/proc/{daemon}").exists(), pipes)


def test_unavailable_mps_is_an_error_before_a_client_runs(host: Host) -> None:
    plain = host.config("run", "plain")
    runs = [
        {**plain, "gpu_compute": 0.5},
        {**plain, "mps": True, "deterministic": True},
        {**plain, "mps": True, "ray_address": "auto"},
        {**plain, "mps": True, "gpu": "never"},
        {**plain, "mps": True},
    ]
    errors = host.lines(*runs, PATH=os.environ["PATH"], PYTHONHASHSEED="0")
    assert {kind for kind, _ in errors} == {"ConfigError"}
    parts = ("with mps", "deterministic", "ray_address", "may not use any GPU", "no nvidia-cuda-mps-control")
    for (_, text), part in zip(errors, parts, strict=True):
        assert part in text
    [[_, text]] = host.lines({**plain, "mps": True}, MPS_STUB_UNLIMITED="1")
    assert "does not limit its clients" in text and "[132] has [132]" in text


@given(whole=st.integers(32, 256), part=st.integers(1, 90), group=st.sampled_from([1, 2, 4]))
def test_a_share_differs_from_no_share(whole: int, part: int, group: int) -> None:
    """The driver rounds a share up or down to groups of processors."""
    wanted = whole * part // 100
    for rounded in (wanted // group * group, -(-wanted // group) * group):
        assert mps._is_limited(max(rounded, group), whole, part)
    assert not mps._is_limited(whole, whole, part)


@given(share=st.floats(0.01, 1))
def test_shares_are_at_least_as_large_as_requested(share: float) -> None:
    part = mps._percentage(Lease("ab12", (), compute=share))
    assert 1 <= part <= 100 and part >= 100 * share - 1e-9
    assert part < 100 * share + 1 + 1e-9 or share > 0.95
