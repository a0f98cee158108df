"""The inventory of GPUs, taken with the real nvidia-ml-py on stub hosts in all states."""

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

Take = Callable[..., Any]
Start = Callable[[dict[str, str]], Any]


def listed(pid: int, used: int | None, name: str, computes: bool = True) -> dict[str, Any]:
    return {"pid": pid, "used_bytes": used, "name": name, "computes": computes}


def memory(gpu: dict[str, Any]) -> tuple[Any, ...]:
    return gpu["total_bytes"], gpu["used_bytes"], gpu["free_bytes"], gpu["reserved_bytes"]


def test_the_inventory_of_an_idle_host(host: Host, take: Take) -> None:
    result = take()
    assert result["driver_version"] == "550.54.14"
    assert result["problem"] is None
    assert result["usable"] == host.uuids
    first, second = result["gpus"]
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
        "is_exclusive": False,
        "limited_by": None,
    }
    differences = {"index": 1, "uuid": host.uuids[1], "device_files": ["/dev/nvidia1"]}
    assert second == {**first, **differences}


def test_memory_of_another_program_is_counted_until_it_ends(host: Host, take: Take) -> None:
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


def test_memory_of_workers_is_counted_while_they_exist(host: Host, take: Take, taker: Start) -> None:
    workers = [taker(host.env) for _ in range(3)]
    for worker in workers:
        worker(f"allocate 0 {2 * GIB}")
    assert workers[0](f"allocate {host.uuids[0]} {GIB}") == 5 * GIB == host.used(0)
    gpu = take()["gpus"][0]
    assert gpu["used_bytes"] == 5 * GIB
    bytes_by_pid = {process["pid"]: process["used_bytes"] for process in gpu["processes"]}
    assert bytes_by_pid == dict(zip([worker.pid for worker in workers], (GIB, 2 * GIB, 2 * GIB), strict=True))
    assert all(process["name"] == sys.executable for process in gpu["processes"])
    workers[1].kill()
    assert take()["gpus"][0]["used_bytes"] == 3 * GIB == host.used(0)
    workers[0](f"allocate 0 {0}")
    assert take()["gpus"][0]["used_bytes"] == 2 * GIB


def test_a_lost_gpu_is_not_usable_until_it_comes_back(host: Host, take: Take) -> None:
    host.set(0, lost=True)
    # A GPU that is lost from the start has no known UUID and name.
    for uuid, name in (("", ""), (host.uuids[0], "NVIDIA Stub 16GB")):
        for _ in range(2):
            result = take()
            lost, healthy = result["gpus"]
            assert "it is lost" in lost["problem"] and "dmesg" in lost["problem"]
            assert (lost["index"], lost["uuid"], lost["name"]) == (0, uuid, name)
            assert memory(lost) == (None,) * 4
            assert healthy["problem"] is None and result["problem"] is None
            assert result["usable"] == [host.uuids[1]]
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
def test_a_gpu_with_an_error_is_not_usable(host: Host, take: Take, code: int, words: str) -> None:
    host.set(0, error=code)
    result = take()
    assert words in result["gpus"][0]["problem"]
    assert result["usable"] == [host.uuids[1]]


def test_refused_figures_are_unknown_and_only_those_of_memory_are_a_problem(host: Host, take: Take) -> None:
    host.program(0, GIB)
    for version in ("v2", "v3"):
        host.fail(f"nvmlDeviceGetComputeRunningProcesses_{version}", nvml_stub.NO_PERMISSION, index=0)
    result = take()
    assert result["gpus"][0]["processes"] is None
    assert result["gpus"][0]["used_bytes"] == GIB
    assert result["gpus"][1]["processes"] == []
    assert result["usable"] == host.uuids
    for function in ("nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMemoryInfo_v2"):
        host.fail(function, nvml_stub.NOT_SUPPORTED, index=0)
    result = take()
    assert "how much memory" in result["gpus"][0]["problem"]
    assert memory(result["gpus"][0]) == (None,) * 4
    assert result["gpus"][0]["name"] == "NVIDIA Stub 16GB"
    assert result["usable"] == [host.uuids[1]]


def test_each_process_is_listed_once_even_if_its_memory_or_name_is_unknown(host: Host, take: Take) -> None:
    host.program(0, GIB, pid=7_000_000, name="/usr/bin/blender")
    host.program(0, GIB, pid=7_000_000, name="/usr/bin/blender", graphics=True)
    host.program(0, 2 * GIB, pid=7_000_001, name="/usr/bin/Xorg", graphics=True)
    assert take()["gpus"][0]["processes"] == [
        listed(7_000_000, GIB, "/usr/bin/blender"),
        listed(7_000_001, 2 * GIB, "/usr/bin/Xorg", computes=False),
    ]
    program = host.program(1, GIB)
    program.path.write_bytes(b"%d 1 -1 %d \xff\xfe\n" % (program.pid, GIB))  # the name is not UTF-8
    assert take()["gpus"][1]["processes"] == [listed(program.pid, GIB, "")]
    host.set(1, hidden=1)
    assert take()["gpus"][1]["processes"] == [listed(program.pid, None, "")]
    assert take()["usable"] == host.uuids


def test_clients_of_mps_are_listed_and_counted_once(host: Host, take: Take) -> None:
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


def test_the_compute_mode_is_reported_and_prohibited_gpus_are_not_usable(host: Host, take: Take) -> None:
    for number, mode in ((3, "EXCLUSIVE_PROCESS"), (2, "PROHIBITED"), (0, "DEFAULT")):
        host.set(0, compute_mode=number)
        result = take()
        assert result["gpus"][0]["compute_mode"] == mode
        assert (host.uuids[0] in result["usable"]) == (mode != "PROHIBITED")
        if mode == "PROHIBITED":
            assert "nvidia-smi -i 0 -c DEFAULT" in result["gpus"][0]["problem"]
    host.set(0, compute_mode=2)
    [mig] = host.mig(0, [8 * GIB])
    take("close")  # NVML reads at its start if a card supports MIG
    assert "PROHIBITED" in take()["gpus"][1]["problem"]
    host.set(0, compute_mode=3)
    assert (take()["usable"][0], take()["gpus"][1]["compute_mode"]) == (mig, "EXCLUSIVE_PROCESS")


def test_an_inventory_of_some_gpus_does_not_query_the_others(host: Host, take: Take) -> None:
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
    # A GPU that was lost in between can be queried again.
    host.set(0, lost=True)
    assert take(f"of {host.uuids[0]}") == []
    host.set(0, lost=False)
    assert len(take(f"of {host.uuids[0]}")) == 1


def test_mig_devices_replace_their_card(host: Host, take: Take, taker: Start) -> None:
    small, large = host.mig(1, [4 * GIB, 8 * GIB])
    taker(host.env)(f"allocate {large} {3 * GIB}")
    result = take()
    plain, card, first, second = result["gpus"]
    assert result["usable"] == [host.uuids[0], small, large]
    assert (plain["mig_parent"], plain["problem"]) == (None, None)
    assert card["problem"] == "MIG mode is on: its MIG devices are used instead"
    assert (first["uuid"], first["index"], first["mig_parent"]) == (small, 1, host.uuids[1])
    assert (first["name"], first["problem"]) == ("NVIDIA Stub 16GB MIG 1g.4gb", None)
    assert (first["utilization_percent"], second["utilization_percent"]) == (None, None)
    assert memory(first) == (4 * GIB, 0, 4 * GIB, 0)
    assert memory(second) == (8 * GIB, 3 * GIB, 5 * GIB, 0)
    assert card["used_bytes"] == 3 * GIB
    assert [process["used_bytes"] for process in second["processes"]] == [3 * GIB]


def test_changes_of_the_mig_mode_are_noticed(host: Host, take: Take) -> None:
    host.mig(0, None)  # the card supports MIG mode, but the mode is off
    assert take()["usable"] == host.uuids
    instances = host.mig(0, [GIB])
    assert take()["usable"] == [*instances, host.uuids[1]]
    instances = host.mig(0, [GIB, GIB])
    assert take()["usable"] == [*instances, host.uuids[1]]
    host.mig(0, [])
    result = take()
    assert "it has no MIG device" in result["gpus"][0]["problem"]
    assert result["usable"] == [host.uuids[1]]
    host.mig(0, None)
    assert take()["usable"] == host.uuids


@pytest.mark.parametrize("fails", ["one", "all", "the card"])
def test_a_problem_of_a_mig_device_or_card_does_not_affect_others(host: Host, take: Take, fails: str) -> None:
    first, second = host.mig(0, [GIB, GIB])
    usable = {"one": [second], "all": [], "the card": [first, second]}[fails]
    if fails == "one":
        host.set(first, error=nvml_stub.NO_PERMISSION)
    elif fails == "all":
        host.fail("nvmlDeviceGetMigDeviceHandleByIndex", nvml_stub.NO_PERMISSION, index=0)
    else:
        for function in ("nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMemoryInfo_v2"):
            host.fail(function, nvml_stub.NO_PERMISSION, index=0)
    result = take()
    assert result["usable"] == [*usable, host.uuids[1]]
    assert result["gpus"][0]["uuid"] == host.uuids[0]
    assert ("may not use it" in str(result["gpus"][1]["problem"])) == (fails != "the card")
    assert result["gpus"][1]["mig_parent"] == host.uuids[0]


@pytest.mark.parametrize("driver", ["470.199.02", "418.40"])
def test_the_inventory_works_with_an_old_driver_that_lacks_functions(
    tmp_path: Path, taker: Start, driver: str
) -> None:
    host = Host(tmp_path / "old", reserved=500 * MIB, driver=driver)
    program = host.program(0, GIB)
    take = taker(host.env)
    for _ in range(2):  # in the second round, the missing functions are known
        result = take()
        gpu = result["gpus"][0]
        assert result["driver_version"] == driver
        # An old driver reports used memory including the memory that it reserves.
        assert memory(gpu) == (16 * GIB, GIB + 500 * MIB, 15 * GIB - 500 * MIB, None)
        processes = [listed(program.pid, GIB, "/usr/bin/other")]
        assert gpu["processes"] == (processes if driver.startswith("470") else None)
        assert result["usable"] == host.uuids


def test_a_driver_that_is_too_old_is_reported(tmp_path: Path, taker: Start) -> None:
    host = Host(tmp_path / "ancient", driver="375.20")
    result = taker(host.env)()
    assert result["gpus"] == []
    assert "too old" in result["problem"]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (nvml_stub.DRIVER_NOT_LOADED, "the NVIDIA driver is not loaded"),
        (nvml_stub.NO_PERMISSION, "/dev/nvidiactl"),
        (nvml_stub.LIB_RM_VERSION_MISMATCH, "different versions"),
        (nvml_stub.UNKNOWN, "'Unknown Error' (NVML code 999)"),
    ],
)
def test_a_driver_that_cannot_start_is_reported_until_it_starts(
    host: Host, take: Take, code: int, words: str
) -> None:
    host.fail_init(code)
    for _ in range(2):
        result = take()
        assert result["gpus"] == [] and result["usable"] == [] and result["driver_version"] is None
        assert words in result["problem"]
    host.fail_init(0)
    assert take()["usable"] == host.uuids


def test_a_driver_without_gpus_is_reported(host: Host, take: Take) -> None:
    host.set_count(0)
    result = take()
    assert result["gpus"] == [] and "shows no GPU" in result["problem"]
    assert result["driver_version"] == "550.54.14"
    host.set_count(1)
    assert take()["usable"] == host.uuids[:1]


def test_a_missing_and_a_broken_library_are_reported(tmp_path: Path) -> None:
    result = inventory_with_library_in(tmp_path)
    assert result["gpus"] == []
    assert result["problem"].startswith("no NVIDIA driver here: libnvidia-ml.so.1 is missing. ")
    (tmp_path / "libnvidia-ml.so.1").write_text("this is no library")
    result = inventory_with_library_in(tmp_path)
    assert result["gpus"] == []
    assert "cannot be loaded" in result["problem"]
    assert "file too short" in result["problem"] or "ELF" in result["problem"]


def inventory_with_library_in(folder: Path) -> dict[str, Any]:
    """Return the inventory of a new process. The loader reads the search path only when a program starts."""
    with suppress(OSError):
        ctypes.CDLL("libnvidia-ml.so.1")
        pytest.skip("this machine has NVIDIA's library")
    command = [sys.executable, str(Path(__file__).with_name("taker.py")), "--alone"]
    env = {**os.environ, "LD_LIBRARY_PATH": str(folder), "PYTHONPATH": str(TESTS)}
    completed = run(command, env=env, input="take\n", check=True)
    result: dict[str, Any] = json.loads(completed.stdout)["answer"]
    return result


def test_a_fork_initialises_nvml_again(host: Host, take: Take) -> None:
    """The fork must not wait for a thread that exists only in its parent."""
    assert take("fork")["usable"] == host.uuids
    take()
    # The stub refuses handles of the parent in a fork.
    assert take("fork")["usable"] == host.uuids
    assert take()["usable"] == host.uuids
    assert take("fork-meanwhile")["usable"] == host.uuids


def test_nvml_of_the_user_and_ours_do_not_affect_each_other(host: Host, take: Take) -> None:
    take("user nvmlInit")
    assert take()["usable"] == host.uuids
    take("close")
    assert take("user nvmlDeviceGetCount") == 2  # the user's NVML is still open
    take()
    take("user nvmlShutdown")
    assert take()["usable"] == host.uuids  # ours is still open


def test_a_surplus_shutdown_of_nvml_does_no_harm(host: Host, take: Take) -> None:
    take()
    take("user nvmlShutdown")
    assert take()["usable"] == host.uuids
    take("user nvmlShutdown")
    take("user nvmlInit")  # older handles are invalid now, but NVML does not say so
    assert take()["usable"] == host.uuids


def test_close_shuts_nvml_down(host: Host, take: Take) -> None:
    take("close")
    take()
    take("close")
    with pytest.raises(AssertionError, match="Uninitialized"):
        take("user nvmlDeviceGetCount")
    assert take()["usable"] == host.uuids
