"""Whole federations on a host with stub GPUs: every call leases its share, where the policy says so."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from launched import QUICKSTART, REPOSITORY, Launch, Launched, assert_nothing_left
from ledger_observer import observed
from nvml_stub import GIB, Host

from flower_gpu import trace
from flower_gpu.calls.settings import RESERVE_BYTES
from flower_gpu.leases.admission import SHARED_PART
from flower_gpu.leases.ledger import Ledger
from flower_gpu.leases.ledger_folder import LedgerFolder

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

APPS = Path(__file__).parent
DEVICE_POLICY = REPOSITORY / "examples" / "device-policy"


class StubHost(Host):
    """A host with a ledger and learned footprints of its own."""

    def __init__(self, folder: Path, gpus: int) -> None:
        super().__init__(folder, gpus=gpus)
        self.ledger = folder / "ledger"
        self.ledger.mkdir()
        self.env["FLOWER_GPU_LEDGER_DIR"] = str(self.ledger)
        # The launcher has PyTorch ask NVML whether there is CUDA. Here it would be told of a GPU that only
        # NVML has.
        self.env["PYTORCH_NVML_BASED_CUDA_CHECK"] = "0"

    def observed(self) -> AbstractContextManager[list[dict[str, int]]]:
        """Look all the time at who holds how much."""
        return observed(
            self.ledger,
            lambda holders: {one.id: sum(part.memory_bytes for part in one.parts) for one in holders},
        )


def events_of(folder: Path, *names: str) -> list[dict[str, Any]]:
    return [event for event in trace.read(folder / trace.FILE_NAME) if event["event"] in names]


def most_at_a_time(folder: Path) -> int:
    """Return how many workers with a lease there were at a time: each starts after its lease, ends before."""
    running: set[str] = set()
    most = 0
    for event in events_of(folder, "worker_started", "worker_finished"):
        if "lease" in event:
            (running.add if event["event"] == "worker_started" else running.discard)(event["lease"])
            most = max(most, len(running))
    return most


def leased(done: Launched) -> dict[str, set[int]]:
    """Return the GPUs that each client had, by the trace."""
    found: dict[str, set[int]] = {}
    for event in events_of(done.folder, "lease_granted"):
        found.setdefault(event["client"], set()).update(gpu["index"] for gpu in event["gpus"])
    return found


def test_four_supernodes_share_a_gpu_on_which_three_fit(launch: Launch, tmp_path: Path) -> None:
    host = StubHost(tmp_path / "host", gpus=1)
    options = ("--clients", "4", "--gpu-memory", "5GiB", "--rounds", "1", "--local-epochs", "1")
    with host.observed() as seen:
        done = launch(
            QUICKSTART,
            *options,
            command=[str(REPOSITORY / "run.sh")],
            env={**host.env, "FLOWER_GPU_VENV": sys.prefix},
        )
    assert done.code == 0, done.output + done.logs()
    assert "GPU 0 (NVIDIA Stub 16GB) has room for 3 at a time" in done.output

    assert 2 <= most_at_a_time(done.folder) <= 3, "three times 5 GiB and the reserve fit into 16 GiB"
    assert max(sum(leases.values()) for leases in seen) <= 15 * GIB
    granted = events_of(done.folder, "lease_granted")
    released = events_of(done.folder, "lease_released")
    assert {event["lease"] for event in granted} == {event["lease"] for event in released}
    assert set().union(*seen) <= {event["lease"] for event in granted}, "every lease is in the trace"
    assert {event["gpus"][0]["memory_bytes"] for event in granted} == {5 * GIB}
    assert sorted(event["client"] for event in granted) == [*"0123", "server", "server"]
    assert not Ledger(LedgerFolder(host.ledger)).status().holders

    workers = done.result["workers"]
    assert all(worker["gpus"][0]["memory_bytes"] == 5 * GIB for worker in workers if worker["task"] == "fit")
    assert [worker["task"] for worker in workers if not worker["gpus"]] == ["quickstart.task:initial_weights"]
    assert done.result["leases"]["count"] == 6
    assert done.result["leases"]["waited_s"] == pytest.approx(sum(w["waited_s"] for w in workers), abs=0.01)
    table = done.output[done.output.index("┏") : done.output.index("result  ")]
    assert "5.0 GiB" in table and "leases      6, waited for" in table
    assert max(len(line) for line in table.splitlines() if str(done.folder) not in line) <= 80


@pytest.mark.parametrize("engine", ["superlink", "start-client"])
def test_gpus_are_dealt_out_and_the_policy_goes_before_what_the_run_wants(
    engine: str, launch: Launch, tmp_path: Path
) -> None:
    host = StubHost(tmp_path / "host", gpus=2)
    options = ("--clients", "3", "--gpu", "force", "--gpu-ids", "1,0")
    done = launch(DEVICE_POLICY, "--engine", engine, *options, "--use-gpu", "false", env=host.env)
    assert done.code == 0, done.output + done.logs()
    assert leased(done) == {"0": {1}, "1": {0}, "2": {1}}
    assert "the node forces it, though the run wants none" in done.log(
        "run" if engine == "superlink" else "server"
    )


def test_a_run_that_wants_no_gpu_leases_none(launch: Launch, tmp_path: Path) -> None:
    host = StubHost(tmp_path / "host", gpus=1)
    options = ("--clients", "2", "--use-gpu", "false", "--gpu-memory", "2GiB")
    done = launch(DEVICE_POLICY, *options, env=host.env)
    assert done.code == 0, done.output + done.logs()
    assert [worker["task"] for worker in done.result["workers"]] == ["fit", "fit"]
    assert leased(done) == {} and "leases" not in done.result
    assert "note: --gpu-memory 2GiB has no effect" in done.output


@pytest.mark.parametrize(
    ("engine", "option", "with_lease"),
    [
        ("superlink", ("--node-config", 'gpu="never"'), {"server"}),
        ("start-client", ("--gpu", "never"), set()),
    ],
)
def test_code_that_does_not_hand_its_context_on_obeys_too(
    engine: str, option: tuple[str, ...], with_lease: set[str], launch: Launch, tmp_path: Path
) -> None:
    host = StubHost(tmp_path / "host", gpus=1)
    done = launch(APPS / "numpy_app", "--engine", engine, *option, env=host.env)
    assert done.code == 0, done.output + done.logs()
    assert set(leased(done)) == with_lease


def test_four_nodes_with_four_policies(tmp_path: Path) -> None:
    """The example as it is: its SuperLink, its SuperNodes, its two runs."""
    host = StubHost(tmp_path / "host", gpus=1)
    logs = tmp_path / "logs"
    done = subprocess.run(
        [DEVICE_POLICY / "federation.sh", logs],
        env={
            **os.environ,
            **host.env,
            "PORT": str(five_free_ports()),
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
    )
    readable = "\n".join(path.read_text() for path in logs.glob("*.log"))
    assert done.returncode == 0, done.stdout + readable
    readme = (DEVICE_POLICY / "README.md").read_text()
    shown = [line.strip() for line in readme.splitlines() if line.startswith("    | ")]
    assert [line for line in done.stdout.splitlines() if line.startswith("| ")] == shown
    told = done.stdout.partition("what the nodes were told:\n")[2]
    assert "no-gpu: this call runs on the CPU though the server requests a GPU" in told
    assert "keeps-it: this call runs on the CPU though the server requests a GPU" in told
    assert "forces-it: this node's policy is force: a GPU is used though the server does not want" in told
    assert "offers-it" not in told
    assert len(events_of(logs, "worker_started")) == 8
    granted = events_of(logs, "lease_granted")
    assert len(granted) == 3, "two nodes with use-gpu=true, one of them with false"
    sizes = sorted(event["gpus"][0]["memory_bytes"] for event in granted)
    quarter = int(int((16 * GIB - RESERVE_BYTES) * SHARED_PART) * 0.25)
    assert sizes == [2 * GIB, quarter, quarter], "each node's own, and not what the app asks for"
    assert_nothing_left(logs)


def five_free_ports() -> int:
    """Return the first of five ports, one after the other, that nobody listens on."""
    begin = 5 * (os.getpid() % 2000)  # tests of another clone look for some, too
    for first in (*range(21000 + begin, 32000, 5), *range(21000, 21000 + begin, 5)):
        sockets = [socket.socket() for _ in range(5)]
        try:
            for number, probe in enumerate(sockets):
                probe.bind(("127.0.0.1", first + number))
        except OSError:
            continue
        else:
            return first
        finally:
            for probe in sockets:
                probe.close()
    raise AssertionError("no five free ports")
