"""Findings of `flower-gpu doctor` on healthy machines and on machines with problems."""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from unittest.mock import Mock

import cuda_stub
import pytest
from command_shell import Shell
from installed_again import installed_again
from nvml_stub import GIB, Host
from run_programs import run_python

from flower_gpu import control_group
from flower_gpu.calls import runner
from flower_gpu.cli import doctor
from flower_gpu.doctor import Check, Finding, FindingParts, cuda, environment, examine
from flower_gpu.doctor import host as system
from flower_gpu.errors import ConfigError, LeaseError, LeaseTimeoutError
from flower_gpu.flower import distribution
from flower_gpu.flower.private_names import NAMES
from flower_gpu.gpu.gpus import GPU, Inventory
from flower_gpu.options import SCRIPT_VARIABLES, VARIABLES

PAGE = Path(__file__).parents[2] / "docs/reference/commands.md"
#: Checks in which other processes of this host may cause findings.
AFFECTED_BY_OTHERS = {"one ledger", "SuperLink"}

Findings = list[dict[str, str]]


def texts_of(found: Findings, check: str) -> list[tuple[str, str]]:
    return [(finding["level"], finding["text"]) for finding in found if finding["check"] == check]


def finding_with(found: Findings, check: str, text: str) -> dict[str, str]:
    """Return the only finding of a check that contains a text."""
    (match,) = [finding for finding in found if finding["check"] == check and text in finding["text"]]
    return match


@pytest.fixture
def local_shell(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> Shell:
    """A shell with variables that are set in this process as well."""
    for name in {*os.environ} - {*shell.env}:
        monkeypatch.delenv(name)
    for name, value in shell.env.items():
        monkeypatch.setenv(name, value)
    return shell


def findings(check: Check) -> list[Finding]:
    """Run one check in this process."""
    return list(examine({"": check}))


# The whole --------------------------------------------------------------------------------------------------


def test_a_machine_without_a_gpu_has_no_problem_and_every_check_is_documented(shell: Shell) -> None:
    found = shell.doctor()
    page = PAGE.read_text().partition("## flower-gpu doctor")[2]
    assert all(f"| {name} |" in page for name in doctor.checks())
    problems = {finding["check"] for finding in found if finding["level"] == "problem"}
    assert problems <= AFFECTED_BY_OTHERS
    assert finding_with(found, "driver", "no GPU: no NVIDIA driver here")["level"] == "note"
    assert texts_of(found, "policy") == [("ok", "policy offer: calls run on the CPU")]
    assert texts_of(found, "cuda") == []
    assert texts_of(found, "packages")[1:] == [
        ("ok", distribution.described()),
        ("ok", f"{len(NAMES)} of {len(NAMES)} private names of Flower that are used here exist"),
    ]
    assert finding_with(found, "state folder", "is made with the first call")["level"] == "ok"
    assert not shell.state.exists()


def test_text_and_json_say_the_same_in_lines_that_fit(shell: Shell, host: Host) -> None:
    only = "driver,gpu,policy,torch,variables,ledger"
    shell.on(host).env["FLOWER_GPU_RESERV"] = "1GiB"
    lines = shell("doctor", code=1, env={"ONLY": only}).splitlines()
    # Paths are not broken across lines.
    assert all(len(line) <= 100 or " " not in line[26:] for line in lines)
    joined = " ".join(line.strip() for line in lines)
    found = shell.doctor(only=only)
    assert len(found) > 6
    for finding in found:
        assert " ".join(finding["text"].split()) in " ".join(joined.split())
        assert " ".join(finding["todo"].split()) in " ".join(joined.split())
    assert "problem" in lines[-1]
    # Usable GPUs are not reported as problems.
    assert texts_of(found, "driver") == [("ok", "NVIDIA driver 550.54.14: 2 of 2 GPUs can be used")]
    assert {level for level, _ in texts_of(found, "gpu")} == {"ok"}
    text = "policy offer: calls use GPU 0, 1, one GPU, as much of it as is needed (auto)"
    assert texts_of(found, "policy") == [("ok", f"{text} unless the code says otherwise")]


def test_two_distributions_of_flower_are_a_problem(
    local_shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (name, installed), *_ = distribution.installed().items()
    (other,) = {*distribution.NAMES} - {name}
    folder = installed_again(tmp_path, other)
    monkeypatch.syspath_prepend(str(folder))
    (finding, *_) = [entry for entry in findings(environment.packages) if other in entry.text]
    assert finding.level == "problem"
    assert f"{name} {installed.version}" in finding.text and f"{other} 1.99" in finding.text
    assert str(folder) in finding.text and str(installed.locate_file("")) in finding.text
    assert re.fullmatch(r"pip uninstall -y flwr flwr-nightly && pip install 'flwr[<>=].*'", finding.todo)
    # Either distribution alone counts as Flower.
    monkeypatch.setattr(distribution, "NAMES", (other,))
    assert (distribution.version(), distribution.described()) == ("1.99", f"{other} 1.99")
    assert ("ok", f"{other} 1.99") in [(entry.level, entry.text) for entry in findings(environment.packages)]
    monkeypatch.setattr(distribution, "NAMES", ())
    assert [entry.todo for entry in findings(environment.packages)][1:] == ["pip install flwr"]


def test_commands_of_another_environment_are_a_problem(
    local_shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("flwr", "flower-supernode"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (finding,) = findings(environment._commands)
    assert finding.level == "problem"
    assert f"{tmp_path}/flwr, {tmp_path}/flower-supernode: from an environment other" in finding.text
    assert str(Path(sys.executable).parent) in finding.todo
    monkeypatch.setenv("PATH", "/nowhere")
    (finding,) = findings(environment._commands)
    assert finding.level == "note" and "not on PATH" in finding.text


def test_a_check_that_raises_is_a_finding_and_the_other_checks_still_run() -> None:
    def broken() -> list[FindingParts]:
        raise OSError(5, "no answer")

    def fine() -> list[FindingParts]:
        return [("ok", "fine")]

    first, second = examine({"broken": broken, "fine": fine})
    assert first.level == "problem" and "OSError: [Errno 5] no answer" in first.text
    assert second == Finding("fine", "ok", "fine")


# GPUs -------------------------------------------------------------------------------------------------------


def test_only_unusable_gpus_are_problems(shell: Shell, tmp_path: Path) -> None:
    host = Host(tmp_path / "host", gpus=4)
    host.set(1, lost=True)
    host.mig(2, [8 * GIB])
    host.mig(3, [])
    found = shell.on(host).doctor(only="driver,gpu")
    assert texts_of(found, "driver")[0][0] == "ok"
    assert [level for level, _ in texts_of(found, "gpu")] == ["ok", "problem", "ok", "ok", "problem", "ok"]
    assert "it is lost" in texts_of(found, "gpu")[1][1]
    assert "GPU cap: by the frameworks' allocators (not by the driver: " in texts_of(found, "gpu")[5][1]


# Runs the checks in a single process for several sets of variables.
CHECKS = """
import json, os, sys
from flower_gpu.doctor import gpus
from flower_gpu.gpu import inventory
found = inventory.take()
for variables in json.loads(sys.argv[1]):
    os.environ |= variables
    print(json.dumps(list(gpus.calls(found))))
    for variable in variables:
        del os.environ[variable]
"""


def test_the_effect_of_variables_on_gpus_and_calls_is_shown(shell: Shell, host: Host) -> None:
    too_much = "GPU 1 (NVIDIA Stub 16GB) has 16128MiB for leases; ask for at most 16128MiB"
    rows: list[tuple[dict[str, str], str, str]] = [
        ({"CUDA_VISIBLE_DEVICES": "0,7"}, "note", "hides GPU 1"),
        ({"CUDA_VISIBLE_DEVICES": "0,7"}, "ok", "calls use GPU 0, "),
        ({"CUDA_VISIBLE_DEVICES": "1,1"}, "note", "hides GPU 0, 1"),
        ({"CUDA_VISIBLE_DEVICES": "1,1"}, "ok", "calls run on the CPU"),
        ({"FLOWER_GPU_POLICY": "never"}, "ok", "policy never: calls run on the CPU"),
        ({"FLOWER_GPU_POLICY": "require", "FLOWER_GPU_IDS": "5"}, "problem", "calls fail: "),
        ({"FLOWER_GPU_IDS": "5"}, "note", "5"),
        ({"FLOWER_GPU_MEMORY": "17GiB"}, "problem", too_much),
        ({"FLOWER_GPU_NUM_GPUS": "3"}, "problem", "calls ask for 3 GPUs: a call may use 2 here"),
        ({"FLOWER_GPU_NUM_GPUS": "0.25"}, "ok", "0.25 of one GPU"),
    ]
    variable_sets = json.dumps([row[0] for row in rows])
    process = shell.on(host).start(sys.executable, "-c", CHECKS, variable_sets)
    lines = process.communicate(timeout=60)[0].splitlines()
    for (variables, level, text), line in zip(rows, lines, strict=True):
        matches = [(entry[0], text in entry[1]) for entry in json.loads(line)]
        assert (level, True) in matches, (variables, line)


# PyTorch and CUDA -------------------------------------------------------------------------------------------


def torch_for(folder: Path, cuda_version: str | None, code: str = "") -> str:
    """Write the parts of a PyTorch that can be read without importing it, and return the folder."""
    package = folder / "torch"
    package.mkdir()
    (package / "__init__.py").write_text(code)
    (package / "version.py").write_text(
        "from typing import Optional\n__version__ = '2.9.1'\ndebug = False\n"
        f"cuda: Optional[str] = {cuda_version!r}\ngit_version = 'abc'\nhip: Optional[str] = None\n"
    )
    return str(folder)


def test_torch_for_the_cpu_on_a_host_with_a_gpu_is_a_problem(
    shell: Shell, host: Host, tmp_path: Path
) -> None:
    found = shell.on(host).doctor(only="torch,cuda", env={"PYTHONPATH": torch_for(tmp_path, None)})
    finding = finding_with(found, "torch", "torch 2.9.1 for the CPU only, on a host with a GPU")
    # The suggested build follows from the driver's CUDA version, 12.4.
    assert finding["level"] == "problem" and "whl/cu126" in finding["todo"]
    assert texts_of(found, "cuda") == []


def test_a_driver_that_is_too_old_for_torch_is_a_problem(
    shell: Shell, cuda_host: Callable[..., cuda_stub.Host]
) -> None:
    host = cuda_host(driver="470.82.01")
    host.set_cuda(11040)
    found = shell.on(host).doctor(only="torch")
    finding = finding_with(found, "torch", "driver 470.82.01 has CUDA 11.4 at most")
    assert finding["level"] == "problem"
    for text in ("update the driver to ", "torch by a build for CUDA 11", "whl/cu118"):
        assert text in finding["todo"]


def test_a_driver_without_cuda_is_a_problem(shell: Shell, host: Host, tmp_path: Path) -> None:
    (tmp_path / "libcuda.so.1").write_text("no library")
    env = {"PYTHONPATH": torch_for(tmp_path, "12.8")}
    env["LD_LIBRARY_PATH"] = f"{tmp_path}:{host.env['LD_LIBRARY_PATH']}"
    found = shell.on(host).doctor(only="torch", env=env)
    finding = finding_with(found, "torch", "CUDA's part of driver 550.54.14 cannot be used")
    assert finding["level"] == "problem"


def test_a_worker_is_tried_with_a_lease_that_is_released(
    shell: Shell, cuda_host: Callable[..., cuda_stub.Host]
) -> None:
    # This lease makes the other GPU the emptier one.
    shell.on(cuda_host()).holder("fit of client 0", 4 * GIB)
    found = shell.doctor(only="cuda")
    assert [(level, re.sub(r" \(NVIDIA.*", "", text)) for level, text in texts_of(found, "cuda")] == [
        ("ok", "a worker has a lease of 768 MiB on GPU 1"),
        ("ok", "a worker is refused more than that by PyTorch, with its OutOfMemoryError"),
        # The stand-in for CUDA runs no kernels.
        ("problem", "a worker cannot compute on GPU 1"),
    ]
    version = metadata.version("torch").partition("+")[0]
    assert finding_with(shell.doctor(only="torch"), "torch", f"torch {version}")["level"] == "ok"
    assert texts_of(found, "cuda")[0][1].endswith("of which PyTorch may take 256 MiB")
    assert shell.tickets() == 1


@pytest.mark.parametrize(
    ("error", "level", "text"),
    [
        (AttributeError("no such function"), "problem", "does not work: AttributeError: no such function"),
        (ConfigError("PyTorch does not take it"), "problem", "PyTorch does not take it"),
        (LeaseTimeoutError("no lease"), "note", "no worker was tested: all GPUs are in use"),
        (LeaseError("no ledger"), "note", "no worker was tested: no ledger"),
    ],
)
def test_a_call_that_fails_before_its_task_is_reported_with_its_reason(
    local_shell: Shell, monkeypatch: pytest.MonkeyPatch, error: Exception, level: str, text: str
) -> None:
    """This happens, for example, with a version of PyTorch that cannot enforce a memory cap."""
    monkeypatch.setattr(runner, "run_call", Mock(side_effect=error))
    monkeypatch.setattr(cuda, "driver_cuda", lambda: ((13, 0), ""))
    monkeypatch.setattr(cuda, "build", lambda: cuda.Build("2.10.0", "13.0"))
    gpu = GPU(0, "GPU-1", "a", 16 * GIB, 0, 16 * GIB, 0, 0, ())
    (finding,) = findings(lambda: cuda.works(Inventory((gpu,), "580.65.06", None)))
    assert finding.level == level and finding.text.endswith(text)


# Installed packages, and variables --------------------------------------------------------------------------


def test_the_versions_of_flower_are_those_of_the_metadata() -> None:
    wanted = environment._wanted_flower()
    versions = {"1.39.9": False, "1.40": True, "1.42.0.dev1": True, "2.0.0": False}
    assert {version: environment._fits(version, wanted) for version in versions} == versions


@pytest.mark.parametrize(
    ("name", "intended"),
    [
        ("FLOWER_GPU_RESERV", "FLOWER_GPU_RESERVE"),
        ("FLOWER_GPU_VEN", "FLOWER_GPU_VENV"),
        ("FLWR_GPU_MEMORY", "FLOWER_GPU_MEMORY"),
        ("flower_gpu_policy", "FLOWER_GPU_POLICY"),
    ],
)
def test_a_typo_in_the_name_of_a_variable_is_a_problem_with_a_suggestion(
    local_shell: Shell, name: str, intended: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "1")
    findings_by_text = {entry.text: entry for entry in findings(environment.variables)}
    finding = findings_by_text[f"{name} is set, but nothing reads it"]
    assert (finding.level, finding.todo) == ("problem", f"{intended} is meant?")


def test_invalid_values_are_named_and_valid_values_shown(
    local_shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = {"FLOWER_GPU_MEMORY": "2GiB", "FLOWER_GPU_TIMEOUT_S": "60", "FLOWER_GPU_START_METHOD": "spawn"}
    good |= dict.fromkeys(SCRIPT_VARIABLES, "here")
    for name, value in good.items():
        monkeypatch.setenv(name, value)
    (finding,) = findings(environment.variables)
    assert finding.level == "ok"
    assert all(f"{name}={value}" in finding.text for name, value in good.items())
    monkeypatch.setenv("FLOWER_GPU_NUM_GPUS", "1")
    (finding,) = findings(environment.variables)
    assert finding.level == "problem" and "are both given" in finding.text
    bad = [name for name in VARIABLES if not name.endswith(("_DIR", "_CLIENT"))]
    for name in bad:
        monkeypatch.setenv(name, "?")
    all_findings = findings(environment.variables)
    for name in bad:
        (finding,) = [entry for entry in all_findings if entry.todo.endswith(f" {name}")]
        assert finding.level == "problem"
        assert name in finding.text or name == "FLOWER_GPU_ON_OOM"


# The host ---------------------------------------------------------------------------------------------------


def without_privileges() -> None:
    """Drop root's privilege to ignore file modes. Call this in a child before it runs a program."""
    # 24 is PR_CAPBSET_DROP. The capabilities are CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH.
    for capability in (1, 2):
        ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)


def test_a_low_limit_of_open_files_and_an_unwritable_ledger_are_problems(shell: Shell) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, 2000))
        without_privileges()

    shell.ledger.chmod(0o555)
    found = shell.doctor(only="system,ledger", preexec_fn=limit)
    finding = finding_with(found, "system", "may open 200 files only")
    assert finding["level"] == "problem"
    assert finding["todo"] == "ulimit -n 2000, before you start Flower"
    finding = finding_with(found, "ledger", "cannot write to")
    assert finding["level"] == "problem"


def test_a_container_that_the_kernel_kills_as_one_is_noted(
    local_shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kubernetes sets up containers in this way."""
    monkeypatch.setattr(control_group, "is_killed_as_one", lambda: True)
    assert [entry.level for entry in findings(system.system) if "memory.oom.group" in entry.text] == ["note"]


def test_a_state_folder_that_others_can_write_to_is_a_problem(local_shell: Shell) -> None:
    local_shell.state.mkdir()
    local_shell.state.chmod(0o777)
    (finding,) = findings(system.state_folder)
    assert finding.level == "problem" and "no other user can write to" in finding.text
    (finding,) = findings(system.fork_servers)
    assert finding.level == "problem" and "workers are spawned" in finding.text


def test_a_fork_server_that_does_not_answer_is_a_problem(local_shell: Shell) -> None:
    code = "import light_servers; light_servers.begin(); import flower_gpu as f; "
    code += "print(f.run_in_worker('os:getppid', start_method='forkserver'))"
    path = str(Path(__file__).parents[1] / "workers")
    env = {**local_shell.env, "FLOWER_GPU_POLICY": "never", "PYTHONPATH": path}
    done = run_python(code, env=env)
    assert done.returncode == 0, done.stderr
    pid = int(done.stdout)
    try:
        assert findings(system.fork_servers) == [
            Finding("", "ok", f"fork server {pid} answers, 1 calls so far")
        ]
        os.kill(pid, signal.SIGSTOP)
        (finding,) = findings(system.fork_servers)
        assert finding.level == "problem" and f"fork server {pid} does not answer" in finding.text
        assert f"kill -CONT {pid}" in finding.todo
    finally:
        os.kill(pid, signal.SIGKILL)


# The ledger -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "level", "text", "todo"),
    [
        (None, "problem", "is not a folder", "mkdir -p -m 1777 {}"),
        (0o777, "problem", "it is not sticky", "chmod +t {}"),
        (0o755, "note", "not every account can write there", "nothing, if only this account uses GPUs; "),
        (0o1777, "ok", "for all accounts of this host", ""),
    ],
)
def test_the_mode_of_the_ledgers_folder_is_checked(
    local_shell: Shell, mode: int | None, level: str, text: str, todo: str
) -> None:
    local_shell.ledger.rmdir() if mode is None else local_shell.ledger.chmod(mode)
    (finding,) = findings(system.ledger_folder)
    assert finding.level == level and text in finding.text
    assert finding.todo.startswith(todo.format(local_shell.ledger))
    if level == "ok":
        folder_of_account = local_shell.ledger / f"flower-gpu-leases-{os.getuid()}"
        folder_of_account.chmod(0o777)
        (finding,) = findings(system.ledger_folder)
        assert finding.level == "problem" and str(folder_of_account) in finding.text


def test_a_stuck_mutex_is_a_problem_that_names_its_holder(
    local_shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(system, "_MUTEX_WAIT_S", 0.1)
    # The check creates the mutex.
    findings(system.leases)
    with open(local_shell.ledger / "flower-gpu-leases.mutex") as mutex:
        fcntl.flock(mutex, fcntl.LOCK_EX)
        (finding,) = findings(system.leases)
    assert finding.level == "problem" and f"locked for 0.1 s by process {os.getpid()}" in finding.text


def test_an_invalid_ticket_file_is_noted_with_its_path(local_shell: Shell) -> None:
    path = local_shell.ledger / f"flower-gpu-leases-{os.getuid()}" / "1-1-1.ticket"
    path.parent.mkdir()
    path.write_text("{}")
    counted, noted = findings(system.leases)
    assert (counted.level, counted.text) == ("ok", "0 held, 0 waiting")
    assert noted.level == "note" and str(path) in noted.text


def test_tickets_are_counted_and_tickets_in_another_ledger_are_a_problem(
    local_shell: Shell, host: Host, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    local_shell.on(host).holder("fit of client 0", "alone", count=2)
    killed = local_shell.waiter("fit of client 1", "1.0")
    killed.kill()
    killed.wait()
    ((level, text),) = texts_of(local_shell.doctor(only="leases"), "leases")
    assert level == "ok" and text.startswith("1 held, 0 waiting; 1 left by processes")
    other = tmp_path / "other"
    other.mkdir()
    local_shell.holder("fit of client 0", 2 * GIB, env={"FLOWER_GPU_LEDGER_DIR": str(other)})
    monkeypatch.setattr(system, "_DEFAULT", str(other))
    gpus = tuple(GPU(0, uuid, "", None, None, None, None, None, None) for uuid in host.uuids)
    (finding,) = findings(lambda: system.other_ledger(Inventory(gpus, None, None)))
    assert finding.level == "problem" and finding.text.startswith("1 lease or request is in another ledger")
    assert finding.todo == f"start all that share these GPUs with FLOWER_GPU_LEDGER_DIR={local_shell.ledger}"


# Flower -----------------------------------------------------------------------------------------------------


@pytest.mark.e2e
def test_a_local_superlink_with_other_variables_is_a_problem(shell: Shell, tmp_path: Path) -> None:
    """The doctor reads the command line and variables of a real SuperLink from the kernel."""
    log = tmp_path / "local-superlink" / "superlink.log"
    log.parent.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    program = str(Path(sys.executable).with_name("flower-superlink"))
    options = ("--insecure", "--host", "127.0.0.1", "--port", port, "--simulation", "--log-file", str(log))
    nothing = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    env = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "FLOWER_GPU_POLICY": "never"}
    pid = shell.start(program, *options, env=env, **nothing).pid
    name = f"the local SuperLink {pid}, which flwr run has left running,"
    found = shell.doctor(only="SuperLink", env={"FLOWER_GPU_POLICY": "never"})
    assert finding_with(found, "SuperLink", name)["level"] == "ok"
    found = shell.doctor(only="SuperLink", env={"CUDA_VISIBLE_DEVICES": "0"})
    finding = finding_with(found, "SuperLink", name)
    assert finding["level"] == "problem"
    assert "CUDA_VISIBLE_DEVICES (not set there, '0' here)" in finding["text"]
    assert "FLOWER_GPU_POLICY ('never' there, not set here)" in finding["text"]
    assert finding["todo"].startswith(f"kill {pid};")
