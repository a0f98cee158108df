"""Tasks that try to open devices, and what else they may do."""

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


def opened(paths: list[str]) -> dict[str, list[str]]:
    """Return which of these paths can be opened, by each way to try."""
    os.environ["CUDA_VISIBLE_DEVICES"] = "0,1"
    for name in [name for name in os.environ if name.startswith("FLOWER_GPU_")]:
        del os.environ[name]
    found: dict[str, list[str]] = {"here": [path for path in paths if can_open(path)], "thread": []}
    thread = threading.Thread(target=lambda: found["thread"].extend(filter(can_open, paths)))
    thread.start()
    thread.join()
    found["program"] = [
        path
        for path in paths
        if subprocess.run([sys.executable, "-S", "-c", _READ, path], check=False).returncode == 0
    ]
    found["link"] = [path for path in paths if can_open(f"/proc/self/root{path}")]
    return found


def can_open(path: str) -> bool:
    try:
        with open(path, "rb"):
            return True
    except PermissionError as error:
        assert error.errno == errno.EACCES
        return False


def read(descriptor: int) -> str:
    """Read from what this process was left open."""
    try:
        return str(len(os.read(descriptor, 1)))
    except OSError as error:
        return errno.errorcode[error.errno or 0]


def rulesets() -> int:
    """Count the rulesets of Landlock that this process has open: it could add to them."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # what lists them
            found.append(str(entry.readlink()))
    return len([link for link in found if "landlock" in link or "mountinfo" in link])


def make_device(like: str, path: str) -> str:
    """Make another file for the same device."""
    try:
        os.mknod(path, stat.S_IFCHR | 0o600, Path(like).stat().st_rdev)
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return "made"


def everything_else(folder: str) -> str:
    """Do with files what programs do."""
    one, two = Path(folder, "one"), Path(folder, "two")
    one.mkdir()
    two.mkdir()
    (one / "file").write_text("text")
    (one / "file").replace(two / "file")
    os.link(two / "file", one / "again")
    (one / "link").symlink_to(two / "file")
    one.rename(two / "one")
    os.mkfifo(two / "fifo")
    with open("/dev/null", "w") as null:
        null.write("text")
    memory = os.memfd_create("any")
    with open(f"/proc/self/fd/{memory}", "wb") as again:
        again.write(b"text")
    Path("/dev/shm", f"flower-gpu-guard-{os.getpid()}").touch()
    Path("/dev/shm", f"flower-gpu-guard-{os.getpid()}").unlink()
    subprocess.run("true", check=True)
    return (two / "one" / "link").read_text()


def nested() -> dict[str, object]:
    """Start workers within a worker."""
    from flower_gpu import run_in_worker
    from flower_gpu.errors import WorkerStartError

    found: dict[str, object] = {"auto": run_in_worker("guard_tasks:seven")}
    try:
        found["forkserver"] = run_in_worker("guard_tasks:seven", start_method="forkserver")
    except WorkerStartError as error:
        found["forkserver"] = str(error)
    return found


def seven() -> int:
    return 7
