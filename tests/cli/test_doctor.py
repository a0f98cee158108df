"""What `flower-gpu doctor` finds on machines that are fine, and on such that are not."""

from __future__ import annotations

import ctypes
import fcntl
import os
import resource
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import nvml_stub
import pytest
from command_shell import Shell
from nvml_stub import GIB, Host

from flower_gpu.cli import doctor
from flower_gpu.doctor import Finding, Found, cuda, environment, examine, superlinks
from flower_gpu.options import VARIABLES

pytestmark = pytest.mark.timeout(120)

PAGE = Path(__file__).parents[2] / "docs/reference/commands.md"
ELSEWHERE = {"flwr run", "one ledger", "local superlink"}  # what other processes of this host may add

Findings = list[dict[str, str]]


def of(found: Findings, check: str) -> list[tuple[str, str]]:
    return [(finding["level"], finding["text"]) for finding in found if finding["check"] == check]


def one(found: Findings, check: str, text: str) -> dict[str, str]:
    """Return the only finding of a check with this text in it."""
    (finding,) = [one for one in found if one["check"] == check and text in one["text"]]
    return finding


# The whole --------------------------------------------------------------------------------------------------


def test_a_machine_without_a_gpu_is_fine(shell: Shell) -> None:
    found = shell.doctor()
    problems = {finding["check"] for finding in found if finding["level"] == "problem"}
    assert problems <= ELSEWHERE
    assert one(found, "driver", "no GPU: NVIDIA's library")["level"] == "note"
    assert of(found, "policy") == [("ok", "policy offer: calls run on the CPU")]
    assert of(found, "cuda") == []


def test_text_and_json_say_the_same_in_lines_that_fit(shell: Shell, host: Host) -> None:
    shell.on(host).env["FLOWER_GPU_RESERV"] = "1GiB"
    lines = shell("doctor", code=1).splitlines()
    assert all(len(line) <= 100 or " " not in line[26:] for line in lines)  # paths stay in one piece
    joined = " ".join(line.strip() for line in lines)
    for finding in shell.doctor():
        if finding["check"] not in ELSEWHERE:
            assert " ".join(finding["text"].split()) in " ".join(joined.split())
            assert " ".join(finding["todo"].split()) in " ".join(joined.split())
    assert "problem" in lines[-1]


def test_every_check_is_documented(shell: Shell) -> None:
    page = PAGE.read_text().partition("## flower-gpu doctor")[2]
    for name in doctor.checks():
        assert f"| {name} |" in page


def test_a_check_that_fails_itself_is_a_finding_and_the_others_go_on() -> None:
    def broken() -> list[Found]:
        raise OSError(5, "no answer")

    def fine() -> list[Found]:
        return [("ok", "fine")]

    first, second = examine({"broken": broken, "fine": fine})
    assert first.level == "problem" and "OSError: [Errno 5] no answer" in first.text
    assert second == Finding("fine", "ok", "fine")


# GPUs -------------------------------------------------------------------------------------------------------


def test_gpus_that_can_be_used_are_ok(shell: Shell, host: Host) -> None:
    found = shell.on(host).doctor()
    assert of(found, "driver") == [("ok", "NVIDIA driver 550.54.14: 2 of 2 GPUs can be used")]
    assert {level for level, _ in of(found, "gpu")} == {"ok"}
    text = "policy offer: calls use GPU 0, 1, one GPU, as much of it as is needed (auto)"
    assert of(found, "policy") == [("ok", f"{text} where the code names nothing else")]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, None),
        ({"unlisted": 1}, "2.0 GiB are used by nobody whom the driver lists here"),
        ({"shift": 9_000_000}, "2.0 GiB are used by nobody whom the driver lists here"),
        ({"hidden": 1}, "the driver does not tell how much each process uses"),
    ],
)
def test_what_the_driver_does_not_tell_of_processes_is_a_note(
    shell: Shell, host: Host, fields: dict[str, Any], text: str | None
) -> None:
    host.set(0, **fields)
    program = host.program(0, 2 * GIB, pid=os.getpid())
    found = of(shell.on(host).doctor(), "gpu")
    program.end()
    notes = [what for level, what in found if level == "note"]
    assert len(notes) == (text is not None)
    if text is not None:
        assert text in notes[0] and "cannot be measured" in notes[0]


def test_a_lost_gpu_is_a_problem_and_the_other_is_not(shell: Shell, host: Host) -> None:
    host.set(1, lost=True)
    found = shell.on(host).doctor()
    assert of(found, "driver")[0][0] == "ok"
    (first, _), (second, text) = of(found, "gpu")
    assert (first, second) == ("ok", "problem")
    assert "it is lost" in text


def test_persistence_mode_that_is_off_is_a_note(shell: Shell, host: Host) -> None:
    host.set(0, persistence=1)
    assert "persistence" not in str(of(shell.on(host).doctor(), "gpu"))
    host.set(1, persistence=0)
    found = one(shell.doctor(), "gpu", "persistence mode of GPU 1 is off")
    assert found["level"] == "note" and "nvidia-smi -pm 1" in found["todo"]


def test_a_card_in_mig_mode_needs_devices(shell: Shell, host: Host) -> None:
    host.mig(0, [8 * GIB])
    host.mig(1, [])
    found = shell.on(host).doctor()
    assert [level for level, _ in of(found, "gpu")] == ["ok", "ok", "problem"]


def test_a_driver_that_does_not_start_is_told(shell: Shell, host: Host) -> None:
    host.fail_init(nvml_stub.LIB_RM_VERSION_MISMATCH)
    assert "are of different versions" in of(shell.on(host).doctor(), "driver")[0][1]


@pytest.mark.parametrize(
    ("value", "level", "text"),
    [
        ("0", "note", "hides GPU 1"),
        ("", "note", "hides GPU 0, 1"),
        ("-1", "note", "hides GPU 0, 1"),
        ("0,1", "ok", "hides no GPU"),
        ("0,7", "problem", "CUDA shows GPU 0"),
        ("1,1", "problem", "CUDA shows none"),
    ],
)
def test_what_cuda_visible_devices_hides(shell: Shell, host: Host, value: str, level: str, text: str) -> None:
    found = shell.on(host).doctor({"CUDA_VISIBLE_DEVICES": value})
    assert one(found, "visible", text)["level"] == level


@pytest.mark.parametrize(
    ("variables", "level", "text"),
    [
        ({"FLOWER_GPU_POLICY": "never"}, "ok", "policy never: calls run on the CPU"),
        ({"FLOWER_GPU_POLICY": "require", "FLOWER_GPU_NUM": "5"}, "problem", "calls fail: "),
        ({"FLOWER_GPU_NUM": "5"}, "note", "5"),
        (
            {"FLOWER_GPU_MEMORY": "17GiB"},
            "problem",
            "GPU 1 (NVIDIA Stub 16GB) has 16128MiB for leases; ask for at most 16128MiB",
        ),
        ({"FLOWER_GPU_NUM_GPUS": "3"}, "problem", "calls ask for 3 GPUs: a call may use 2 here"),
        ({"FLOWER_GPU_NUM_GPUS": "0.25"}, "ok", "0.25 of one GPU"),
    ],
)
def test_what_a_call_would_get(
    shell: Shell, host: Host, variables: dict[str, str], level: str, text: str
) -> None:
    found = shell.on(host).doctor(variables)
    assert (level, True) in [(how, text in what) for how, what in of(found, "policy")]


# PyTorch and CUDA -------------------------------------------------------------------------------------------


def torch_for(folder: Path, cuda_version: str | None, code: str = "") -> str:
    """Put a PyTorch into a folder, as far as it can be read without importing it."""
    package = folder / "torch"
    package.mkdir()
    (package / "__init__.py").write_text(code)
    (package / "version.py").write_text(
        "from typing import Optional\n__version__ = '2.9.1'\ndebug = False\n"
        f"cuda: Optional[str] = {cuda_version!r}\ngit_version = 'abc'\nhip: Optional[str] = None\n"
    )
    return str(folder)


def driver_for(folder: Path, version: int, host: Host) -> dict[str, str]:
    """Build CUDA's part of the driver, which does nothing but tell its version."""
    code = f"int cuDriverGetVersion(int *version) {{ *version = {version}; return 0; }}\n"
    command = ["gcc", "-shared", "-fPIC", "-xc", "-", "-Wl,-soname,libcuda.so.1"]
    subprocess.run([*command, "-o", str(folder / "libcuda.so.1")], input=code, text=True, check=True)
    return {"LD_LIBRARY_PATH": f"{folder}:{host.env['LD_LIBRARY_PATH']}"}


def test_the_build_of_torch_is_read_without_importing_it() -> None:
    code = "import torch; print(torch.__version__, torch.version.cuda)"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    build = cuda.build()
    assert build is not None
    assert told.split() == [build.version, str(build.cuda)]


def test_torch_for_the_cpu_on_a_host_with_a_gpu_is_a_problem(
    shell: Shell, host: Host, tmp_path: Path
) -> None:
    env = {"PYTHONPATH": torch_for(tmp_path, None)}
    assert of(shell.doctor(env), "torch") == [("ok", "torch 2.9.1 for the CPU only")]
    found = shell.on(host).doctor(env)
    finding = one(found, "torch", "torch 2.9.1 for the CPU only, on a host with a GPU")
    assert finding["level"] == "problem" and "whl/cu126" in finding["todo"]  # by the CUDA of the driver, 12.4
    assert of(found, "cuda") == []


def test_a_driver_that_is_too_old_for_torch_is_a_problem(shell: Shell, host: Host, tmp_path: Path) -> None:
    env = {"PYTHONPATH": torch_for(tmp_path, "13.0"), **driver_for(tmp_path, 12040, host)}
    finding = one(shell.on(host).doctor(env), "torch", "driver 550.54.14 has CUDA 12.4 at most")
    assert finding["level"] == "problem"
    for text in ("update the driver to 580.65.06 or later", "torch by a build for CUDA 12", "whl/cu126"):
        assert text in finding["todo"]


def test_a_driver_without_cuda_is_a_problem(shell: Shell, host: Host, tmp_path: Path) -> None:
    (tmp_path / "libcuda.so.1").write_text("no library")
    env = {"PYTHONPATH": torch_for(tmp_path, "12.8")}
    env["LD_LIBRARY_PATH"] = f"{tmp_path}:{host.env['LD_LIBRARY_PATH']}"
    finding = one(shell.on(host).doctor(env), "torch", "CUDA's part of driver 550.54.14 cannot be used")
    assert finding["level"] == "problem"


def test_cuda_is_tried_under_a_lease_that_is_given_back(shell: Shell, host: Host, tmp_path: Path) -> None:
    shell.on(host)
    shell.holder("fit of client 0", 4 * GIB)  # so the other one is the emptier
    code = "import os\nraise RuntimeError(os.environ['CUDA_VISIBLE_DEVICES'])\n"
    env = {"PYTHONPATH": torch_for(tmp_path, "12.8", code), **driver_for(tmp_path, 12080, host)}
    found = shell.doctor(env)
    assert of(found, "torch") == [("ok", "torch 2.9.1 for CUDA 12.8; the driver has CUDA 12.8")]
    failed = one(found, "cuda", f"CUDA does not work on GPU 1: RuntimeError: {host.uuids[1]}")
    assert failed["level"] == "problem"
    assert shell.tickets() == 1


@pytest.mark.parametrize("unlisted", [0, 1])
def test_the_trial_tells_whether_the_driver_lists_a_worker(
    shell: Shell, host: Host, tmp_path: Path, unlisted: int
) -> None:
    for index in range(2):
        host.set(index, unlisted=unlisted)
    code = f"""
import os, sys
sys.path.append({str(Path(__file__).parents[1])!r})
import nvml_stub
class ones:
    def __init__(self, *shape, device): nvml_stub.allocate(os.environ["CUDA_VISIBLE_DEVICES"], 1 << 30)
    def __matmul__(self, other): return self
    def sum(self): return self
    def item(self): return 256**3
class cuda:
    get_device_name = staticmethod(lambda index: "A GPU")
"""
    env = {"PYTHONPATH": torch_for(tmp_path, "12.8", code), **driver_for(tmp_path, 12080, host)}
    first, *rest = of(shell.on(host).doctor(env), "cuda")
    assert first[0] == "ok" and first[1].startswith("a worker computed on GPU")
    assert [level for level, _ in rest] == ["note"] * unlisted
    if unlisted:
        assert "the driver does not tell how much memory that worker used" in rest[0][1]


def test_cuda_is_not_tried_while_all_gpus_are_leased(shell: Shell, host: Host, tmp_path: Path) -> None:
    shell.on(host).holder("fit of client 0", "alone", count=2)
    env = {"PYTHONPATH": torch_for(tmp_path, "12.8"), **driver_for(tmp_path, 12080, host)}
    assert of(shell.doctor(env), "cuda") == [("note", "not tried: all GPUs are in use")]


# What is installed ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "fits"), [("1.39.9", False), ("1.40", True), ("1.42.0.dev1", True), ("2.0.0", False)]
)
def test_the_versions_of_flower_are_those_of_the_metadata(version: str, fits: bool) -> None:
    assert environment.wanted_flower().contains(version, prereleases=True) is fits


def test_flower_is_in_the_range_of_the_metadata(shell: Shell) -> None:
    assert of(shell.doctor(), "flower") == [
        ("ok", f"flwr {metadata.version('flwr')}"),
        ("ok", "its commands are on PATH, from this environment"),
    ]


def test_commands_of_another_environment_are_a_problem(shell: Shell, tmp_path: Path) -> None:
    other = tmp_path / "other" / "bin"
    other.mkdir(parents=True)
    for name in ("flwr", "flower-supernode"):
        (other / name).write_text("#!/bin/sh\n")
        (other / name).chmod(0o755)
    finding = one(shell.doctor({"PATH": f"{other}:{shell.env['PATH']}"}), "flower", "another environment")
    assert finding["level"] == "problem"
    assert f"{other}/flwr, {other}/flower-supernode belong" in finding["text"]
    assert str(Path(sys.executable).parent) in finding["todo"]


def test_commands_that_are_not_on_path_are_a_note(shell: Shell, tmp_path: Path) -> None:
    assert one(shell.doctor({"PATH": str(tmp_path)}), "flower", "are not on PATH")["level"] == "note"


# Variables --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("FLOWER_GPU_RESERV", "FLOWER_GPU_RESERVE"),
        ("FLOWER_GPU_POLICIES", "FLOWER_GPU_POLICY"),
        ("FLOWER_GPU_LEASE_TIMEOUT", "FLOWER_GPU_LEASE_TIMEOUT_S"),
        ("FLWR_GPU_MEMORY", "FLOWER_GPU_MEMORY"),
        ("flower_gpu_policy", "FLOWER_GPU_POLICY"),
    ],
)
def test_a_typo_in_a_name_is_a_problem_with_the_name_that_is_meant(
    shell: Shell, name: str, meant: str
) -> None:
    finding = one(shell.doctor({name: "1"}), "variables", f"{name} is set, and nothing reads it")
    assert finding["level"] == "problem"
    assert finding["todo"] == f"{meant} is meant?"


def test_all_values_that_cannot_be_used_are_named(shell: Shell) -> None:
    any_text = ("_DIR", "_CLIENT")
    bad = {name: "?" for name in VARIABLES if not name.endswith(any_text)}
    found = shell.doctor(bad)
    told = [finding for finding in found if finding["check"] == "variables"]
    for name in bad:
        (finding,) = [one for one in told if one["todo"].endswith(f" {name}")]
        assert finding["level"] == "problem"
        assert name in finding["text"] or name == "FLOWER_GPU_ON_OOM"


def test_two_requests_at_once_are_a_problem(shell: Shell) -> None:
    found = shell.doctor({"FLOWER_GPU_MEMORY": "2GiB", "FLOWER_GPU_NUM_GPUS": "1"})
    assert one(found, "variables", "are both given")["level"] == "problem"


def test_good_values_are_shown(shell: Shell) -> None:
    good = {"FLOWER_GPU_MEMORY": "2GiB", "FLOWER_GPU_TIMEOUT_S": "60", "FLOWER_GPU_START_METHOD": "spawn"}
    text = one(shell.doctor(good), "variables", "")
    assert text["level"] == "ok"
    assert all(f"{name}={value}" in text["text"] for name, value in good.items())


# The host ---------------------------------------------------------------------------------------------------


def test_few_files_are_a_problem(shell: Shell) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, 2000))

    finding = one(shell.doctor(preexec_fn=limit), "limits", "may open 200 files only")
    assert finding["level"] == "problem"
    assert finding["todo"] == "ulimit -n 2000, before what is started here"


def test_a_state_folder_that_others_can_write_to_is_a_problem(shell: Shell) -> None:
    shell.state.mkdir()
    shell.state.chmod(0o777)
    found = shell.doctor()
    assert one(found, "state folder", "nobody else can write to")["level"] == "problem"
    assert one(found, "fork server", "workers are spawned")["level"] == "problem"
    assert stat.S_IMODE(shell.state.stat().st_mode) == 0o777


def test_nothing_is_made_in_the_state_folder(shell: Shell) -> None:
    assert one(shell.doctor(), "state folder", "is made with the first call")["level"] == "ok"
    assert not shell.state.exists()


def test_a_fork_server_answers_or_does_not(shell: Shell) -> None:
    code = "import flower_gpu as f; print(f.run_in_worker('os:getppid', start_method='forkserver'))"
    env = {**shell.env, "FLOWER_GPU_POLICY": "never"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    pid = int(done.stdout)
    try:
        text = one(shell.doctor(), "fork server", f"fork server {pid} answers, 1 calls so far")
        assert text["level"] == "ok"
        os.kill(pid, signal.SIGSTOP)
        finding = one(shell.doctor(), "fork server", f"fork server {pid} does not answer")
        assert finding["level"] == "problem"
        assert f"kill -CONT {pid}" in finding["todo"]
    finally:
        os.kill(pid, signal.SIGKILL)


# The ledger -------------------------------------------------------------------------------------------------


def without_privileges() -> None:
    """Make root keep to the modes of folders, as everybody else: in a child, before it runs a program."""
    for capability in (1, 2):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
        ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP


def test_a_ledger_folder_that_cannot_be_written_to_is_a_problem(shell: Shell) -> None:
    shell.ledger.chmod(0o555)
    finding = one(
        shell.doctor(preexec_fn=without_privileges), "ledger", "cannot be written to by this account"
    )
    assert finding["level"] == "problem"
    assert str(shell.state / f"flower-gpu-{os.getuid()}" / "ledger") in finding["text"]


def test_a_ledger_folder_that_is_not_there_is_a_problem(shell: Shell) -> None:
    shell.ledger.rmdir()
    finding = one(shell.doctor(), "ledger", "is not a folder")
    assert finding["level"] == "problem"
    assert finding["todo"] == f"mkdir -p -m 1777 {shell.ledger}"


def test_a_ledger_folder_that_is_not_sticky_is_a_problem(shell: Shell) -> None:
    shell.ledger.chmod(0o777)
    assert one(shell.doctor(), "ledger", "it is not sticky")["todo"] == f"chmod +t {shell.ledger}"


def test_a_ledger_folder_of_one_account_is_a_note(shell: Shell) -> None:
    shell.ledger.chmod(0o755)
    assert one(shell.doctor(), "ledger", "not every account can write there")["level"] == "note"


def test_an_accounts_folder_that_others_can_write_to_is_a_problem(shell: Shell) -> None:
    own = shell.ledger / f"flower-gpu-leases-{os.getuid()}"
    own.mkdir()
    own.chmod(0o777)
    assert one(shell.doctor(), "ledger", str(own))["level"] == "problem"


def test_a_stuck_mutex_is_a_problem_that_names_who_has_it(shell: Shell) -> None:
    shell.doctor()  # makes it
    with open(shell.ledger / "flower-gpu-leases.mutex") as mutex:
        fcntl.flock(mutex, fcntl.LOCK_EX)
        finding = one(shell.doctor(), "leases", f"locked for 2 s by process {os.getpid()}")
    assert finding["level"] == "problem"


def test_holders_waiters_and_leftovers_are_counted(shell: Shell, host: Host) -> None:
    shell.on(host)
    shell.holder("fit of client 0", "alone", count=2)
    killed = shell.waiter("fit of client 1", "1.0")
    assert of(shell.doctor(), "leases") == [("ok", "1 held, 1 waiting")]
    killed.kill()
    killed.wait()
    assert of(shell.doctor(), "leases")[0][1].startswith("1 held, 0 waiting; 1 left by processes")


def test_leases_in_another_ledger_are_a_problem(shell: Shell, host: Host, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    user = shell.on(host).holder("fit of client 0", 2 * GIB, env={"FLOWER_GPU_LEDGER_DIR": str(other)})
    finding = one(shell.doctor(), "one ledger", f"{other} of process {user.pid} ")
    assert "1 lease or request is in another ledger" in finding["text"]
    assert (finding["level"], finding["todo"]) == (
        "problem",
        f"start all that share these GPUs with FLOWER_GPU_LEDGER_DIR={shell.ledger}",
    )


def test_another_ledger_that_gives_out_other_gpus_is_a_note(shell: Shell, host: Host, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    user = shell.start("sleep", "100", env={"FLOWER_GPU_LEDGER_DIR": str(other)})
    finding = one(
        shell.on(host).doctor(), "one ledger", f"{other} is the ledger of process {user.pid} (sleep)"
    )
    assert finding["level"] == "note"


# Flower -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "address"),
    [
        ('address = "host:8000"', "host:8000"),
        ('address = ":local-in-memory:"', ":local-in-memory:"),
        ("options.num-supernodes = 2", ":local:"),
    ],
)
def test_the_connection_of_flwr_run_is_read(tmp_path: Path, settings: str, address: str) -> None:
    path = tmp_path / "config.toml"
    assert superlinks.default_connection(path) == ("local", ":local:")
    path.write_text(f'[superlink]\ndefault = "x"\n[superlink.x]\n{settings}\n')
    assert superlinks.default_connection(path) == ("x", address)


@pytest.mark.parametrize(
    "text", ["[superlink", "superlink = 3", "superlink.default = 'x'\nsuperlink.x = 1\n"]
)
def test_a_configuration_that_cannot_be_read_is_said_to_be_so(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.toml"
    path.write_text(text)
    with pytest.raises(ValueError):
        superlinks.default_connection(path)


def test_options_of_a_command_line_are_read() -> None:
    process = superlinks.OtherProcess(
        1, 0, ("python", "/x/bin/flower-superlink", "--a", "b", "--c=d", "--e"), {}
    )
    assert process.runs("flower-superlink") and not process.runs("superlink")
    assert [process.option(name) for name in ("--a", "--c", "--e", "--f")] == ["b", "d", "", None]


StartLink = Callable[..., int]


@pytest.fixture
def superlink(shell: Shell, tmp_path: Path) -> StartLink:
    """Start a real SuperLink; return its pid."""

    def start(*options: str, **env: str) -> int:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        command = ["flower-superlink", "--insecure", "--host", "127.0.0.1", "--port", port, *options]
        nothing = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        program = str(Path(sys.executable).with_name(command[0]))
        env = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", **env}
        return shell.start(program, *command[1:], env=env, **nothing).pid

    return start


@pytest.mark.e2e
def test_superlinks_that_build_environments_are_problems(shell: Shell, superlink: StartLink) -> None:
    builds = superlink()
    with_option = superlink("--disable-runtime-dependency-installation")
    with_variable = superlink(FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION="1")
    elsewhere = superlink("--isolation", "process")
    found = shell.doctor()
    finding = one(found, "flwr run", f"SuperLink {builds} builds an environment")
    assert finding["level"] == "problem"
    assert "--disable-runtime-dependency-installation" in finding["todo"]
    for pid in (with_option, with_variable, elsewhere):
        assert one(found, "flwr run", f"SuperLink {pid} ")["level"] == "ok"


@pytest.mark.e2e
def test_a_local_superlink_with_other_variables_is_a_problem(
    shell: Shell, superlink: StartLink, tmp_path: Path
) -> None:
    log = tmp_path / "local-superlink" / "superlink.log"
    log.parent.mkdir()
    pid = superlink("--simulation", "--log-file", str(log), FLOWER_GPU_POLICY="never")
    name = f"the local SuperLink {pid}, which flwr run has left running,"
    assert one(shell.doctor({"FLOWER_GPU_POLICY": "never"}), "local superlink", name)["level"] == "ok"
    finding = one(shell.doctor({"CUDA_VISIBLE_DEVICES": "0"}), "local superlink", name)
    assert finding["level"] == "problem"
    assert "CUDA_VISIBLE_DEVICES (not set there, '0' here)" in finding["text"]
    assert "FLOWER_GPU_POLICY ('never' there, not set here)" in finding["text"]
    assert finding["todo"].startswith(f"kill {pid};")
