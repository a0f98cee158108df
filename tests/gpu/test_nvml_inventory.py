"""What is told about GPUs through the real nvidia-ml-py, on hosts in every state."""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import nvml_stub
import pytest
from forked import TESTS
from nvml_stub import GIB, Host
from run_programs import run

MIB = 2**20

Start = Callable[[dict[str, str]], Any]


@pytest.fixture
def take(host: Host, taker: Start) -> Callable[..., Any]:
    return taker(host.env)


def listed(pid: int, used: int | None, name: str, computes: bool = True) -> dict[str, Any]:
    return {"pid": pid, "used_bytes": used, "name": name, "computes": computes}


def memory(gpu: dict[str, Any]) -> tuple[Any, ...]:
    return gpu["total_bytes"], gpu["used_bytes"], gpu["free_bytes"], gpu["reserved_bytes"]


def test_an_idle_host(host: Host, take: Callable[..., Any]) -> None:
    found = take()
    assert found["driver_version"] == "550.54.14"
    assert found["problem"] is None
    assert found["usable"] == host.uuids
    first, second = found["gpus"]
    assert first == {
        "index": 0,
        "uuid": host.uuids[0],
        "name": "NVIDIA Stub 16GB",
        "total_bytes": 16 * GIB,
        "used_bytes": 0,
        "free_bytes": 16 * GIB,
        "reserved_bytes": 0,
        "utilization_percent": 0,
        "processes": [],
        "mig_parent": None,
        "problem": None,
        "persistence_mode": None,
        "device_files": ["/dev/nvidia0"],
        "compute_mode": "DEFAULT",
        "limited_by": None,
    }
    another = {"index": 1, "uuid": host.uuids[1], "device_files": ["/dev/nvidia1"]}
    assert second == {**first, **another}


def test_another_program_fills_a_gpu_and_ends(host: Host, take: Callable[..., Any]) -> None:
    host.set(0, reserved=400 * MIB, util=93)
    for used in (4, 8, 12):
        host.set(0, used=used * GIB)
        gpu = take()["gpus"][0]
        assert memory(gpu) == (16 * GIB, used * GIB, (16 - used) * GIB - 400 * MIB, 400 * MIB)
        assert gpu["utilization_percent"] == 93
    program = host.program(0, 3 * GIB, name="/opt/other/train")
    gpu = take()["gpus"][0]
    assert gpu["used_bytes"] == 15 * GIB
    assert gpu["processes"] == [listed(program.pid, 3 * GIB, "/opt/other/train")]
    program.end()
    assert take()["gpus"][0]["used_bytes"] == 12 * GIB
    assert take()["gpus"][1]["used_bytes"] == 0


def test_workers_count_while_they_are_there(host: Host, take: Callable[..., Any], taker: Start) -> None:
    workers = [taker(host.env) for _ in range(3)]
    for worker in workers:
        worker(f"allocate 0 {2 * GIB}")
    assert workers[0](f"allocate {host.uuids[0]} {GIB}") == 5 * GIB == host.used(0)
    gpu = take()["gpus"][0]
    assert gpu["used_bytes"] == 5 * GIB
    told = {one["pid"]: one["used_bytes"] for one in gpu["processes"]}
    assert told == dict(zip([worker.pid for worker in workers], (GIB, 2 * GIB, 2 * GIB), strict=True))
    assert all(one["name"] == sys.executable for one in gpu["processes"])
    workers[1].kill()
    assert take()["gpus"][0]["used_bytes"] == 3 * GIB == host.used(0)
    workers[0](f"allocate 0 {0}")
    assert take()["gpus"][0]["used_bytes"] == 2 * GIB


def test_a_gpu_that_is_lost_and_comes_back(host: Host, take: Callable[..., Any]) -> None:
    host.set(0, lost=True)
    for uuid, name in (("", ""), (host.uuids[0], "NVIDIA Stub 16GB")):  # from the start, and later
        for _ in range(2):
            found = take()
            lost, healthy = found["gpus"]
            assert "it is lost" in lost["problem"] and "dmesg" in lost["problem"]
            assert (lost["index"], lost["uuid"], lost["name"]) == (0, uuid, name)
            assert memory(lost) == (None,) * 4
            assert healthy["problem"] is None and found["problem"] is None
            assert found["usable"] == [host.uuids[1]]
        host.set(0, lost=False)
        assert take()["usable"] == host.uuids
        host.set(0, lost=True)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (nvml_stub.NO_PERMISSION, "may not use it"),
        (8, "power cables"),
        (11, "interrupts"),
        (16, "reset"),
        (nvml_stub.UNKNOWN, "'Unknown Error' (NVML code 999)"),
        (4711, "(NVML code 4711)"),
    ],
)
def test_a_gpu_with_another_problem(host: Host, take: Callable[..., Any], code: int, words: str) -> None:
    host.set(0, error=code)
    found = take()
    assert words in found["gpus"][0]["problem"]
    assert found["usable"] == [host.uuids[1]]


def test_figures_that_are_refused(host: Host, take: Callable[..., Any]) -> None:
    host.program(0, GIB)
    for version in ("v2", "v3"):
        host.fail(f"nvmlDeviceGetComputeRunningProcesses_{version}", nvml_stub.NO_PERMISSION, index=0)
    found = take()
    assert found["gpus"][0]["processes"] is None
    assert found["gpus"][0]["used_bytes"] == GIB
    assert found["gpus"][1]["processes"] == []
    assert found["usable"] == host.uuids
    for function in ("nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMemoryInfo_v2"):  # those of memory, too
        host.fail(function, nvml_stub.NOT_SUPPORTED, index=0)
    found = take()
    assert "how much memory" in found["gpus"][0]["problem"]
    assert memory(found["gpus"][0]) == (None,) * 4
    assert found["gpus"][0]["name"] == "NVIDIA Stub 16GB"
    assert found["usable"] == [host.uuids[1]]


def test_processes_are_listed_once_and_some_without_memory_or_name(
    host: Host, take: Callable[..., Any]
) -> None:
    host.program(0, GIB, pid=7_000_000, name="/usr/bin/blender")
    host.program(0, GIB, pid=7_000_000, name="/usr/bin/blender", graphics=True)
    host.program(0, 2 * GIB, pid=7_000_001, name="/usr/bin/Xorg", graphics=True)
    assert take()["gpus"][0]["processes"] == [
        listed(7_000_000, GIB, "/usr/bin/blender"),
        listed(7_000_001, 2 * GIB, "/usr/bin/Xorg", computes=False),
    ]
    program = host.program(1, GIB)
    program.path.write_bytes(b"%d 1 -1 %d \xff\xfe\n" % (program.pid, GIB))  # no text
    assert take()["gpus"][1]["processes"] == [listed(program.pid, GIB, "")]
    host.set(1, hidden=1)
    assert take()["gpus"][1]["processes"] == [listed(program.pid, None, "")]
    assert take()["usable"] == host.uuids


def test_clients_of_mps_are_listed_and_one_in_two_lists_counts_once(
    host: Host, take: Callable[..., Any]
) -> None:
    client = host.program(0, 2 * GIB, mps=True)
    host.program(0, GIB, pid=client.pid, mps=True)
    host.program(0, GIB, pid=client.pid)
    server = host.program(0, 100 * MIB, name="nvidia-cuda-mps-server")
    assert take()["gpus"][0]["processes"] == [
        listed(client.pid, 2 * GIB, "/usr/bin/other"),
        listed(server.pid, 100 * MIB, "nvidia-cuda-mps-server"),
    ]
    host.fail("nvmlDeviceGetMPSComputeRunningProcesses_v3", nvml_stub.NO_PERMISSION)
    assert take()["gpus"][0]["processes"][1] == listed(server.pid, 100 * MIB, "nvidia-cuda-mps-server")


def test_compute_modes(host: Host, take: Callable[..., Any]) -> None:
    for number, mode in ((3, "EXCLUSIVE_PROCESS"), (2, "PROHIBITED"), (0, "DEFAULT")):
        host.set(0, compute_mode=number)
        found = take()
        assert found["gpus"][0]["compute_mode"] == mode
        assert (host.uuids[0] in found["usable"]) == (mode != "PROHIBITED")
        if mode == "PROHIBITED":
            assert "nvidia-smi -i 0 -c DEFAULT" in found["gpus"][0]["problem"]
    host.set(0, compute_mode=2)
    [mig] = host.mig(0, [8 * GIB])
    take("close")  # NVML tells at its start whether a card knows MIG
    assert "PROHIBITED" in take()["gpus"][1]["problem"]
    host.set(0, compute_mode=3)
    assert (take()["usable"][0], take()["gpus"][1]["compute_mode"]) == (mig, "EXCLUSIVE_PROCESS")


def test_who_has_a_lease_of_some_looks_at_no_other_gpu(host: Host, take: Callable[..., Any]) -> None:
    [mig] = host.mig(1, [8 * GIB])
    host.program(0, GIB)
    host.program(mig, 2 * GIB)
    host.count_calls()
    for uuid, used in ((host.uuids[0], GIB), (mig, 2 * GIB)):
        [gpu] = take(f"of {uuid}")
        assert (gpu["uuid"], gpu["used_bytes"], len(gpu["processes"])) == (uuid, used, 1)
    [calls] = host.calls().values()
    assert calls["nvmlDeviceGetHandleByUUID"] == 2
    assert not [name for name in calls if "ByIndex" in name or "Count" in name]
    # Nothing of what is no lease's stands in the way of the next look.
    host.set(0, lost=True)
    assert take(f"of {host.uuids[0]}") == []
    host.set(0, lost=False)
    assert len(take(f"of {host.uuids[0]}")) == 1


def test_mig_devices_are_used_instead_of_their_card(
    host: Host, take: Callable[..., Any], taker: Start
) -> None:
    small, large = host.mig(1, [4 * GIB, 8 * GIB])
    taker(host.env)(f"allocate {large} {3 * GIB}")
    found = take()
    plain, card, first, second = found["gpus"]
    assert found["usable"] == [host.uuids[0], small, large]
    assert (plain["mig_parent"], plain["problem"]) == (None, None)
    assert card["problem"] == "MIG mode is on: its MIG devices are used instead"
    assert (first["uuid"], first["index"], first["mig_parent"]) == (small, 1, host.uuids[1])
    assert (first["name"], first["problem"]) == ("NVIDIA Stub 16GB MIG 1g.4gb", None)
    assert (first["utilization_percent"], second["utilization_percent"]) == (None, None)
    assert memory(first) == (4 * GIB, 0, 4 * GIB, 0)
    assert memory(second) == (8 * GIB, 3 * GIB, 5 * GIB, 0)
    assert card["used_bytes"] == 3 * GIB
    assert [one["used_bytes"] for one in second["processes"]] == [3 * GIB]


def test_mig_mode_that_changes_while_running(host: Host, take: Callable[..., Any]) -> None:
    host.mig(0, None)  # the card can be in MIG mode, and is not
    assert take()["usable"] == host.uuids
    instances = host.mig(0, [GIB])
    assert take()["usable"] == [*instances, host.uuids[1]]
    instances = host.mig(0, [GIB, GIB])
    assert take()["usable"] == [*instances, host.uuids[1]]
    host.mig(0, [])
    found = take()
    assert "it has no MIG device" in found["gpus"][0]["problem"]
    assert found["usable"] == [host.uuids[1]]
    host.mig(0, None)
    assert take()["usable"] == host.uuids


@pytest.mark.parametrize("fails", ["one", "all", "the card"])
def test_a_mig_device_or_card_with_a_problem_costs_the_others_nothing(
    host: Host, take: Callable[..., Any], fails: str
) -> None:
    first, second = host.mig(0, [GIB, GIB])
    left = {"one": [second], "all": [], "the card": [first, second]}[fails]
    if fails == "one":
        host.set(first, error=nvml_stub.NO_PERMISSION)
    elif fails == "all":
        host.fail("nvmlDeviceGetMigDeviceHandleByIndex", nvml_stub.NO_PERMISSION, index=0)
    else:
        for function in ("nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMemoryInfo_v2"):
            host.fail(function, nvml_stub.NO_PERMISSION, index=0)
    found = take()
    assert found["usable"] == [*left, host.uuids[1]]
    assert found["gpus"][0]["uuid"] == host.uuids[0]
    assert ("may not use it" in str(found["gpus"][1]["problem"])) == (fails != "the card")
    assert found["gpus"][1]["mig_parent"] == host.uuids[0]


@pytest.mark.parametrize("driver", ["470.199.02", "418.40"])
def test_an_old_driver_that_lacks_functions(tmp_path: Path, taker: Start, driver: str) -> None:
    host = Host(tmp_path / "old", reserved=500 * MIB, driver=driver)
    program = host.program(0, GIB)
    take = taker(host.env)
    for _ in range(2):  # the second time it is known what the library lacks
        found = take()
        gpu = found["gpus"][0]
        assert found["driver_version"] == driver
        # What the driver reserves is in what is used: it cannot be told apart.
        assert memory(gpu) == (16 * GIB, GIB + 500 * MIB, 15 * GIB - 500 * MIB, None)
        told = [listed(program.pid, GIB, "/usr/bin/other")]
        assert gpu["processes"] == (told if driver.startswith("470") else None)
        assert found["usable"] == host.uuids


def test_a_driver_too_old_to_be_started(tmp_path: Path, taker: Start) -> None:
    host = Host(tmp_path / "ancient", driver="375.20")
    found = taker(host.env)()
    assert found["gpus"] == []
    assert "too old" in found["problem"]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (nvml_stub.DRIVER_NOT_LOADED, "the NVIDIA driver is not loaded"),
        (nvml_stub.NO_PERMISSION, "/dev/nvidiactl"),
        (nvml_stub.LIB_RM_VERSION_MISMATCH, "different versions"),
        (nvml_stub.UNKNOWN, "'Unknown Error' (NVML code 999)"),
    ],
)
def test_a_driver_that_does_not_start_and_then_does(
    host: Host, take: Callable[..., Any], code: int, words: str
) -> None:
    host.fail_init(code)
    for _ in range(2):
        found = take()
        assert found["gpus"] == [] and found["usable"] == [] and found["driver_version"] is None
        assert words in found["problem"]
    host.fail_init(0)
    assert take()["usable"] == host.uuids


def test_a_driver_without_gpus(host: Host, take: Callable[..., Any]) -> None:
    host.set_count(0)
    found = take()
    assert found["gpus"] == [] and "shows no GPU" in found["problem"]
    assert found["driver_version"] == "550.54.14"
    host.set_count(1)
    assert take()["usable"] == host.uuids[:1]


def test_no_library_and_a_broken_one(tmp_path: Path) -> None:
    found = taken_with_library_in(tmp_path)
    assert found["gpus"] == []
    assert found["problem"].startswith("no NVIDIA driver here: libnvidia-ml.so.1 is missing. ")
    (tmp_path / "libnvidia-ml.so.1").write_text("this is no library")
    found = taken_with_library_in(tmp_path)
    assert found["gpus"] == []
    assert "cannot be loaded" in found["problem"]
    assert "file too short" in found["problem"] or "ELF" in found["problem"]


def taken_with_library_in(folder: Path) -> dict[str, Any]:
    """Return what a new process finds; the loader reads where libraries are when a program begins."""
    with suppress(OSError):
        ctypes.CDLL("libnvidia-ml.so.1")
        pytest.skip("this machine has NVIDIA's library")
    command = [sys.executable, str(Path(__file__).with_name("taker.py")), "--alone"]
    env = {**os.environ, "LD_LIBRARY_PATH": str(folder), "PYTHONPATH": str(TESTS)}
    done = run(command, env=env, input="take\n", check=True)
    found: dict[str, Any] = json.loads(done.stdout)["answer"]
    return found


def test_a_fork_starts_anew(host: Host, take: Callable[..., Any]) -> None:
    """It does not wait for a thread that it does not have, either."""
    assert take("fork")["usable"] == host.uuids
    take()
    assert take("fork")["usable"] == host.uuids  # the stub refuses handles of the process it was forked from
    assert take()["usable"] == host.uuids
    assert take("fork-meanwhile")["usable"] == host.uuids


def test_others_use_nvml_in_the_same_process(host: Host, take: Callable[..., Any]) -> None:
    take("user nvmlInit")
    assert take()["usable"] == host.uuids
    take("close")
    assert take("user nvmlDeviceGetCount") == 2  # ours is not theirs
    take()
    take("user nvmlShutdown")
    assert take()["usable"] == host.uuids  # and theirs not ours


def test_somebody_shuts_nvml_down_too_often(host: Host, take: Callable[..., Any]) -> None:
    take()
    take("user nvmlShutdown")
    assert take()["usable"] == host.uuids
    take("user nvmlShutdown")
    take("user nvmlInit")  # handles from before are worthless, and nothing says so
    assert take()["usable"] == host.uuids


def test_closed_means_closed(host: Host, take: Callable[..., Any]) -> None:
    take("close")
    take()
    take("close")
    with pytest.raises(AssertionError, match="Uninitialized"):
        take("user nvmlDeviceGetCount")
    assert take()["usable"] == host.uuids
