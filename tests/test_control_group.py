"""Quotas and memory limits of control groups, read from prepared files and from real groups of the kernel."""

from __future__ import annotations

import os
import re
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from run_programs import run
from scripted_app import APP

from flower_gpu import control_group
from flower_gpu.workers import oom_kills, threads

MIB = 2**20
ENVIRON = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
UNLIMITED = 9223372036854771712


class Proc:
    """Prepared files of ``/proc/self``, and control groups below a folder."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "proc"
        self.groups = folder / "control groups"
        self.path.mkdir()
        self.groups.mkdir()
        self._mounts = ["25 1 0:22 / /sys rw - sysfs sysfs rw"]

    def is_in(self, *lines: str) -> None:
        (self.path / "cgroup").write_text("".join(f"{line}\n" for line in lines))

    def mount(self, name: str = "", root: str = "/", controllers: str = "") -> Path:
        point = self.groups / name
        point.mkdir(exist_ok=True)
        kind = f"cgroup cgroup rw,{controllers}" if controllers else "cgroup2 cgroup2 rw,nsdelegate"
        escaped = str(point).replace(" ", r"\040")
        self._mounts.append(f"31 25 0:28 {root} {escaped} rw,relatime shared:9 - {kind}")
        (self.path / "mountinfo").write_text("".join(f"{line}\n" for line in self._mounts))
        return point

    @property
    def quota(self) -> float | None:
        limit = control_group.cores_limit(self.path)
        return None if limit is None else limit.cores

    @property
    def memory(self) -> tuple[int, int] | None:
        limit = control_group.memory_limit(self.path)
        return None if limit is None else limit[:2]


@pytest.fixture
def proc(tmp_path: Path) -> Proc:
    return Proc(tmp_path)


def write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(f"{content}\n")


STAT = "anon 1\nfile 999\ninactive_file {0}\nactive_file {1}\nslab_reclaimable {2}"


def test_version_2_uses_the_strictest_limit_of_all_parent_groups(proc: Proc) -> None:
    root = proc.mount()
    proc.is_in("0::/user.slice/job/step")
    # The topmost group has no limits.
    write(root, cpu__pressure="")
    write(root / "user.slice", cpu__max="max 100000", memory__max="max", memory__high="max")
    write(root / "user.slice/job", cpu__max="250000 100000", memory__max=800 * MIB, memory__high="max")
    write(root / "user.slice/job", memory__current=700 * MIB, memory__stat=STAT.format(*(3 * [100 * MIB])))
    write(root / "user.slice/job/step", cpu__max="400000 100000", memory__max="max", memory__high="max")
    assert proc.quota == 2.5
    assert proc.memory == (400 * MIB, 800 * MIB)
    # Above memory.high, the kernel throttles the group.
    write(root / "user.slice/job", memory__high=600 * MIB)
    assert proc.memory == (200 * MIB, 600 * MIB)


def test_version_2_in_a_namespace(proc: Proc) -> None:
    """In a container, the process's group is the topmost group that is visible."""
    root = proc.mount(root="/../..")
    proc.is_in("0::/")
    write(root, cpu__max="50000 100000", memory__max=100 * MIB, memory__high="max", memory__current=120 * MIB)
    write(root, memory__stat=STAT.format(0, 0, 0))
    assert proc.quota == 0.5
    assert proc.memory == (0, 100 * MIB)


@pytest.mark.parametrize(
    ("path", "root", "folder"),
    [
        ("/docker/abc/job", "/", "docker/abc/job"),
        # Without a namespace, the path is that of the host.
        ("/docker/abc/job", "/docker/abc", "job"),
        ("/docker/abc", "/docker/abc", ""),
        # The process was moved out of the namespace.
        ("/../job", "/", ""),
        ("/gone", "/", ""),
    ],
)
def test_version_1_finds_the_group_of_each_controller(path: str, root: str, folder: str, proc: Proc) -> None:
    cpu = proc.mount("cpu,cpuacct", root, "cpu,cpuacct")
    memory = proc.mount("memory", root, "memory")
    unified = proc.mount("unified")
    proc.is_in(f"9:memory:{path}", f"3:cpu,cpuacct:{path}", "1:name=systemd:/x", "0::/x")
    write(unified / "x", cpu__pressure="", memory__pressure="")
    write(cpu, cpu__cfs_quota_us=-1, cpu__cfs_period_us=100000)
    write(cpu / folder, cpu__cfs_quota_us=150000, cpu__cfs_period_us=50000)
    stat = f"inactive_file 1\ntotal_inactive_file {20 * MIB}\ntotal_active_file {30 * MIB}"
    used = {"memory__usage_in_bytes": 90 * MIB, "memory__stat": stat}
    write(memory, memory__limit_in_bytes=UNLIMITED, **used)
    write(memory / folder, memory__limit_in_bytes=100 * MIB, **used)
    assert proc.quota == 3.0
    assert proc.memory == (60 * MIB, 100 * MIB)


@pytest.mark.parametrize("controller", [None, "pids"])
def test_the_process_limit_with_the_least_room_counts(controller: str | None, proc: Proc) -> None:
    root = proc.mount() if controller is None else proc.mount(controller, "/", controller)
    proc.is_in("0::/job/step" if controller is None else "8:pids:/job/step")
    write(root / "job/step", pids__max="max", pids__current=7)
    assert control_group.process_count(proc.path) is None
    write(root / "job", pids__max=100, pids__current=98)
    write(root / "job/step", pids__max=50)
    assert control_group.process_count(proc.path) == (98, 100)


def test_missing_or_invalid_files_give_no_limits(proc: Proc) -> None:
    # Systems other than Linux have no such files.
    assert proc.quota is None and proc.memory is None
    proc.is_in("0::/")
    # No control group file system is mounted.
    assert proc.quota is None and proc.memory is None
    write(proc.mount(), cpu__max="nonsense", memory__max="nonsense", memory__high="")
    control_group._resolved_folders.cache_clear()
    assert proc.quota is None and proc.memory is None


@pytest.mark.parametrize(("quota", "count"), [(None, 8), (0.5, 1), (2.5, 2), (64.0, 8)])
def test_the_number_of_cores_respects_the_quota(
    quota: float | None, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "processor_cores", lambda: 8)
    limit = None if quota is None else control_group.CoresLimit(quota, group=1)
    monkeypatch.setattr(control_group, "cores_limit", lambda: limit)
    assert threads.cores() == count
    assert threads.planned_threads({}) == count


def test_kills_due_to_lack_of_memory_are_counted(proc: Proc, monkeypatch: pytest.MonkeyPatch) -> None:
    proc.is_in("0::/pod/container")
    root = proc.mount()
    write(root / "pod", memory__events="low 0\noom 9\noom_kill 9")
    write(root / "pod/container", memory__events="low 0\noom 3\noom_kill 2\noom_group_kill 0")
    assert control_group.oom_kills(proc.path) == 2
    assert not control_group.is_killed_as_one(proc.path)
    write(root / "pod", memory__oom__group=1)
    assert control_group.is_killed_as_one(proc.path)


def test_kills_are_counted_in_version_1_and_without_groups(
    proc: Proc, monkeypatch: pytest.MonkeyPatch
) -> None:
    proc.is_in("4:memory:/job")
    write(proc.mount("memory", controllers="memory") / "job", memory__oom_control="under_oom 0\noom_kill 5")
    assert control_group.oom_kills(proc.path) == 5
    assert not control_group.is_killed_as_one(proc.path)
    (proc.path / "cgroup").unlink()
    (proc.path / "vmstat").write_text("pgfault 1\noom_kill 7\n")
    monkeypatch.setattr(control_group, "_VMSTAT", proc.path / "vmstat")
    assert control_group.oom_kills(proc.path) == 7
    (proc.path / "vmstat").unlink()
    assert control_group.oom_kills(proc.path) == 0


def test_each_kill_is_claimed_by_one_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other workers that die at the same time were killed for another reason. More memory would not help."""
    kills = 7
    monkeypatch.setattr(control_group, "oom_kills", lambda: kills)
    monkeypatch.setattr(oom_kills, "_claimed", 0)
    count_before = oom_kills.count()
    assert not oom_kills.claim(count_before)
    kills = 9
    assert [oom_kills.claim(count_before) for _ in range(3)] == [True, True, False]
    assert not oom_kills.claim(oom_kills.count())


def test_cores_and_memory_are_counted_in_one_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two counts could differ, for example in a container. A call would then wait for a missing core."""
    other_sources = re.compile(
        r"cpu_count\(|virtual_memory\(|SC_PHYS_PAGES|SC_NPROCESSORS|meminfo|thread_siblings"
    )
    package = Path(control_group.__file__).parent
    counting = [path.name for path in package.rglob("*.py") if other_sources.search(path.read_text())]
    assert counting == ["control_group.py"]
    # The empty folder stands for a system without information about processors.
    for folder in (control_group._CPUS, tmp_path):
        monkeypatch.setattr(control_group, "_CPUS", folder)
        for count in (control_group.all_cores, control_group.cores_of):
            count.cache_clear()
        assert 1 <= threads.processor_cores() <= control_group.all_cores() <= control_group.processors()
    for count in (control_group.all_cores, control_group.cores_of):
        count.cache_clear()


def test_the_hosts_memory_is_known_without_linux_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    memory = control_group.host_memory()
    monkeypatch.setattr(control_group, "_MEMORY", tmp_path / "meminfo")
    assert control_group.host_memory()[1] == memory[1]


# Real control groups ----------------------------------------------------------------------------------------


@pytest.fixture
def group(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A new group below the group of this process, for the controller that the test names."""
    controller = request.param
    groups = control_group._folders(controller, Path("/proc/self"))
    if not groups:
        pytest.skip("no control groups")
    version, parent = groups[0]
    folder = parent / f"flower-gpu-{uuid.uuid4().hex}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made: {error}")
    try:
        limit = {("cpu", 1): "cpu.cfs_quota_us", ("memory", 1): "memory.limit_in_bytes"}
        if not (folder / limit.get((controller, version), f"{controller}.max")).exists():
            pytest.skip(f"the controller {controller} is not passed on to new groups")
        yield folder
    finally:
        folder.rmdir()


def run_in(group: Path, code: str, *arguments: str) -> str:
    program = "import os, sys\nopen(sys.argv[1] + '/cgroup.procs', 'w').write(str(os.getpid()))\n" + code
    command = [sys.executable, "-c", program, str(group), *arguments]
    done = run(command, env=ENVIRON)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("group", ["cpu"], indirect=True)
def test_the_quota_of_a_real_group_limits_the_cores(group: Path) -> None:
    if (group / "cpu.max").exists():
        (group / "cpu.max").write_text("150000 100000")
    else:
        (group / "cpu.cfs_quota_us").write_text("150000")
    code = "from flower_gpu.workers import threads\nprint(threads.cores(), threads.planned_threads({}))"
    assert run_in(group, code) == "1 1\n"


@pytest.mark.parametrize("group", ["memory"], indirect=True)
def test_page_cache_of_a_real_group_is_available(group: Path, tmp_path: Path) -> None:
    """Reading a large data set does not reduce the available memory, but allocated memory does."""
    limit = 600 * MIB
    name = "memory.max" if (group / "memory.max").exists() else "memory.limit_in_bytes"
    (group / name).write_text(str(limit))
    code = f"""
from flower_gpu.control_group import available_memory
taken = bytearray({100 * MIB})
with open(sys.argv[2], "wb") as file:
    for _ in range(400):
        file.write(bytes({MIB}))
    file.flush()
    os.fsync(file.fileno())
with open(sys.argv[2], "rb") as file:
    while file.read({MIB}):
        pass
available, total = available_memory()
used = sum(int(open(f"{{sys.argv[1]}}/{{name}}").read()) for name in
           ("memory.current", "memory.usage_in_bytes") if os.path.exists(f"{{sys.argv[1]}}/{{name}}"))
print(used >> 20, available >> 20, total >> 20)
"""
    used, available, total = map(int, run_in(group, code, str(tmp_path / "data")).split())
    assert total == limit // MIB
    assert 300 <= available <= 500, (used, available)
    if used <= 450:
        pytest.skip(f"the host needed memory and has taken the page cache back: {used} MiB are in use")


@pytest.mark.parametrize("group", ["memory"], indirect=True)
def test_the_kernel_kills_a_worker_and_not_its_larger_caller(group: Path) -> None:
    """The call fails with an error that names the limit, and a run that holds a large model continues."""
    name = "memory.max" if (group / "memory.max").exists() else "memory.limit_in_bytes"
    (group / name).write_text(str(400 * MIB))
    code = f"""
import mmap
import flower_gpu
model = mmap.mmap(-1, {220 * MIB}, flags=mmap.MAP_PRIVATE)
for start in range(0, len(model), 4096):
    model[start] = 1
model.madvise(mmap.MADV_DONTFORK)
def fill(chunks):
    taken = []
    for _ in range(chunks):
        taken.append(bytearray(b"x") * {MIB})
    return len(taken)
for method in ("fork", "spawn"):
    try:
        flower_gpu.run_in_worker(fill, 2048, start_method=method)
    except flower_gpu.WorkerDiedError as error:
        text = str(error)
        print(error.exitcode, error.is_out_of_memory, error.peak_bytes > {100 * MIB}, "second try" in text)
        print(text.partition("ran out")[2].partition("; ")[2].partition(")")[0])
    assert flower_gpu.run_in_worker(fill, 10, start_method=method) == 10
"""
    assert (
        run_in(group, code).splitlines()
        == [
            "-9 True True True",
            "its control group may have 400 MiB",
        ]
        * 2
    )


@pytest.mark.parametrize("group", ["memory"], indirect=True)
def test_a_call_that_the_kernel_kills_is_retried_with_all_memory(group: Path, tmp_path: Path) -> None:
    """The killed call needs more memory than the first, which set the request. Later its peak is known."""
    name = "memory.max" if (group / "memory.max").exists() else "memory.limit_in_bytes"
    (group / name).write_text(str(700 * MIB))
    (ledger := tmp_path / "ledger").mkdir()
    ledger.chmod(0o1777)
    code = """
import threading, time
from pathlib import Path
os.environ["FLOWER_GPU_LEDGER_DIR"], os.environ["FLOWER_GPU_STATE_DIR"] = sys.argv[2], sys.argv[3]
os.environ["FLOWER_GPU_RUN_DIR"] = sys.argv[4]
import flower_gpu
from flower_gpu import control_group, trace
from flower_gpu.leases.footprint import Footprints
from flower_gpu.leases.ledger import Ledger
held, go = Path(sys.argv[4], "held"), Path(sys.argv[4], "go")

def take(mib, waits=False):
    taken = bytearray(b"x") * (mib << 20)
    if waits:
        held.touch()
        while not go.exists():
            time.sleep(0.01)
    return len(taken) >> 20

def peaks_above(mib):
    entries = Footprints().entries().items()
    return [entry.peak_bytes > mib << 20 for key, entry in entries if "take" in key.task]

values = []
def call(*args):
    values.append(flower_gpu.run_in_worker(take, *args, gpu="never", start_method="spawn"))

call(150)
small = threading.Thread(target=call, args=(150, True))
small.start()
while not held.exists():
    time.sleep(0.01)
big = threading.Thread(target=call, args=(560,))
big.start()
try:
    # Only the second try waits for long. The first has room, but its claim is queued for a moment.
    while peaks_above(200) != [True] or not Ledger().status().waiting:
        assert big.is_alive()
        time.sleep(0.02)
    # This is the peak of the killed worker.
    print(peaks_above(200), peaks_above(560))
finally:
    go.touch()
small.join()
big.join()
print(values, peaks_above(550))
events = trace.read(Path(sys.argv[4], "trace.jsonl"), only="cores_requested")
requested = [event["host_memory_bytes"] for event in events]
print(requested[1] == requested[2], requested[3:] == [control_group.host_memory()[1]])
"""
    program = "import os, sys\nopen(sys.argv[1] + '/cgroup.procs', 'w').write(str(os.getpid()))\n" + code
    folders = [str(ledger), str(tmp_path / "state"), str(tmp_path)]
    done = run([sys.executable, "-c", program, str(group), *folders], env=ENVIRON)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[True] [False]", "[150, 150, 560] [True]", "True True"]
    assert "was killed by the kernel because main memory ran out (it had up to" in done.stderr
    assert "It is retried with all the main memory that can be leased" in done.stderr


@pytest.mark.parametrize("group", ["memory"], indirect=True)
def test_idle_workers_of_a_run_end_before_a_second_try_with_all_memory(group: Path, tmp_path: Path) -> None:
    """Two idle workers keep 300 MiB each. Once they have exited, the killed client has enough memory."""
    name = "memory.max" if (group / "memory.max").exists() else "memory.limit_in_bytes"
    (group / name).write_text(str(8192 * MIB))
    code = """
os.environ["FLOWER_GPU_STATE_DIR"], os.environ["LARGE_APP_LIMIT"] = sys.argv[2], sys.argv[3]
import flower_gpu
flower_gpu.simulate(
    sys.argv[4], 2, max_workers=2, log_dir=None, progress=False, gpu="never", start_method="spawn",
    run_config={"server": "allocate", "train": "allocate"},
)
"""
    output = run_in(group, code, str(tmp_path / "state"), str(group / name), str(APP))
    assert "taken: [850]" in output
