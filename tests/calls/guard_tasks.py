"""Tasks that try to open device files, and tasks that do other things which the guard must allow."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

_READ = "import sys; open(sys.argv[1], 'rb').close()"


def paths_opened(paths: list[str]) -> dict[str, list[str]]:
    """Return the paths that can be opened by each kind of attempt."""
    os.environ["CUDA_VISIBLE_DEVICES"] = "0,1"
    for name in [name for name in os.environ if name.startswith("FLOWER_GPU_")]:
        del os.environ[name]
    opened_paths: dict[str, list[str]] = {"process": [path for path in paths if can_open(path)], "thread": []}
    thread = threading.Thread(target=lambda: opened_paths["thread"].extend(filter(can_open, paths)))
    thread.start()
    thread.join()
    opened_paths["program"] = [
        path
        for path in paths
        if subprocess.run([sys.executable, "-S", "-c", _READ, path], check=False).returncode == 0
    ]
    opened_paths["link"] = [path for path in paths if can_open(f"/proc/self/root{path}")]
    return opened_paths


def can_open(path: str) -> bool:
    try:
        with open(path, "rb"):
            return True
    except PermissionError as error:
        assert error.errno == errno.EACCES
        return False


def read_descriptor(descriptor: int) -> str:
    """Read from a descriptor that this process has inherited."""
    try:
        return str(len(os.read(descriptor, 1)))
    except OSError as error:
        return errno.errorcode[error.errno or 0]


def count_rulesets() -> int:
    """Return the number of open Landlock rulesets, to which this process could add rules."""
    links = []
    for entry in Path("/proc/self/fd").iterdir():
        # The descriptor that lists the folder is closed by now.
        with suppress(FileNotFoundError):
            links.append(str(entry.readlink()))
    return len([link for link in links if "landlock" in link or "mountinfo" in link])


def make_device(like: str, path: str) -> str:
    """Create another file for the same device."""
    try:
        os.mknod(path, stat.S_IFCHR | 0o600, Path(like).stat().st_rdev)
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return "made"


def work_with_files(folder: str) -> str:
    """Work with files as ordinary programs do. Return the text of a file."""
    first, second = Path(folder, "one"), Path(folder, "two")
    first.mkdir()
    second.mkdir()
    (first / "file").write_text("text")
    (first / "file").replace(second / "file")
    os.link(second / "file", first / "again")
    (first / "link").symlink_to(second / "file")
    first.rename(second / "one")
    os.mkfifo(second / "fifo")
    with open("/dev/null", "w") as null:
        null.write("text")
    memory = os.memfd_create("any")
    with open(f"/proc/self/fd/{memory}", "wb") as copy:
        copy.write(b"text")
    Path("/dev/shm", f"flower-gpu-guard-{os.getpid()}").touch()
    Path("/dev/shm", f"flower-gpu-guard-{os.getpid()}").unlink()
    subprocess.run("true", check=True)
    return (second / "one" / "link").read_text()


def nested() -> dict[str, object]:
    """Start workers within a worker."""
    from flower_gpu import run_in_worker
    from flower_gpu.errors import WorkerStartError

    results: dict[str, object] = {"auto": run_in_worker("guard_tasks:return_seven")}
    try:
        results["forkserver"] = run_in_worker("guard_tasks:return_seven", start_method="forkserver")
    except WorkerStartError as error:
        results["forkserver"] = str(error)
    return results


def return_seven() -> int:
    return 7
