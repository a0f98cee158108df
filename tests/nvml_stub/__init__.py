"""A host with simulated GPUs: a stub of NVIDIA's management library, and the classes that control it.

Programs that start with :attr:`Host.env` and use nvidia-ml-py see the GPUs of that host, and share its
ledger of leases. The answers of the library come from files, so they can change while programs run::

    host = Host(tmp_path / "host", gpus=2)
    host.set(0, used=12 * GIB)
    subprocess.run(command, env={**os.environ, **host.env})
    host.until(lambda state: not state.holders)

A simulated worker calls :func:`allocate`. Its memory is counted while its process exists.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import platform
import shutil
import subprocess
import tempfile
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from waiting import until

if TYPE_CHECKING:
    from flower_gpu.leases.state import State

GIB = 2**30

Fields = dict[str, int | str]

# Return codes of NVML functions (nvml.h).
NOT_SUPPORTED = 3
NO_PERMISSION = 4
DRIVER_NOT_LOADED = 9
GPU_IS_LOST = 15
LIB_RM_VERSION_MISMATCH = 18
UNKNOWN = 999

_SOURCE = Path(__file__).with_name("nvml.c")
FILES = Path(__file__).with_name("host_files.h")
_NAME = "libnvidia-ml.so.1"
_NO_MIG = -1
_FIRST_PROGRAM = 9_000_000  # above all pids of Linux (PID_MAX_LIMIT is 4,194,304)
_NAMESPACE = uuid.UUID("6f0b1f2e-5d0c-4a6b-9b1a-0f1d2c3b4a59")
_COUNTER = itertools.count()


@cache
def compiled(driver: int) -> Path:
    """Return the path of the library for a major version of the driver.

    It is compiled once for all processes and kept in ``__pycache__``, like bytecode. Before 510 the library
    has no ``nvmlDeviceGetMemoryInfo_v2`` and no third version of the process lists. Before 450 it has no MIG
    and no second version of these lists. Before 390 nvidia-ml-py cannot initialise it.
    """
    code = hashlib.sha256(_SOURCE.read_bytes() + FILES.read_bytes()).hexdigest()[:16]
    name = f"nvml-{driver}-{platform.machine()}-{code}"
    library = Path(__file__).absolute().parent / "__pycache__" / name / _NAME
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        _replace(library, _compile(driver))
    return library


def _compile(driver: int) -> bytes:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise RuntimeError(
            "the NVML stub needs a C compiler and there is neither gcc nor cc: apt-get install gcc"
        )
    flags = ["-std=gnu11", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", f"-DDRIVER={driver}"]
    with tempfile.TemporaryDirectory(prefix="nvml-stub-") as folder:
        library = Path(folder, _NAME)
        command = [compiler, *flags, f"-Wl,-soname,{_NAME}", "-o", str(library), str(_SOURCE)]
        completed = subprocess.run(command, capture_output=True, text=True, check=False)
        if completed.returncode:
            raise RuntimeError(f"{compiler} could not build the NVML stub:\n{completed.stderr}")
        return library.read_bytes()


@dataclass(frozen=True)
class Program:
    """Memory that another program uses on a GPU until :meth:`end` is called."""

    pid: int
    path: Path

    def end(self) -> None:
        """Free the memory."""
        self.path.unlink(missing_ok=True)


class Host:
    """A host with up to 64 stub GPUs and its own ledger. All tests with GPUs describe their host with it.

    - GPUs and their memory: ``gpus``, ``name``, and in bytes ``total`` and ``reserved`` (by the driver).
      :meth:`set` changes a GPU, :meth:`mig` divides it, :meth:`program` lets another program use its memory.
    - Driver: ``driver`` is its version, which decides the symbols of the library (see :func:`compiled`).
      :meth:`fail`, :meth:`fail_init` and :meth:`hang` let its functions fail or block.
    - Processes: they start with the environment variables :attr:`env`. A test adds variables, such as a state
      folder or the folder of a run, to that dict.
    - Leases: :meth:`status`, :meth:`until` and :meth:`observed` read the ledger as an outsider.

    :attr:`uuids` is in the order of the GPUs' numbers. By default, all hosts have the same UUIDs, so that
    their output can be compared. Hosts with different names ``host`` have different UUIDs.

    :class:`cuda_stub.Host` adds GPUs that PyTorch can use.
    """

    def __init__(
        self,
        folder: Path,
        gpus: int = 2,
        total: int = 16 * GIB,
        name: str = "NVIDIA Stub 16GB",
        reserved: int = 0,
        driver: str = "550.54.14",
        host: str = "",
    ) -> None:
        self.folder = folder.absolute()
        # All hosts use the same library file, because processes share a fork server only if their search
        # paths are equal.
        self.stub_file = compiled(int(driver.partition(".")[0]))
        (self.folder / "use").mkdir(parents=True, exist_ok=True)
        self.ledger = self.folder / "ledger"
        self.ledger.mkdir(exist_ok=True)
        # Several accounts share a ledger.
        self.ledger.chmod(0o1777)
        paths = [str(self.stub_file.parent), os.environ.get("LD_LIBRARY_PATH", "")]
        self.env = {
            "LD_LIBRARY_PATH": ":".join(filter(None, paths)),
            "NVML_STUB_DIR": str(self.folder),
            "FLOWER_GPU_LEDGER_DIR": str(self.ledger),
            # PyTorch must not learn of a GPU that exists only in NVML.
            "PYTORCH_NVML_BASED_CUDA_CHECK": "0",
        }
        self.uuids = [f"GPU-{uuid.uuid5(_NAMESPACE, f'{host}{index}')}" for index in range(gpus)]
        for index, gpu_uuid in enumerate(self.uuids):
            fields: Fields = {"uuid": gpu_uuid, "name": name, "total": total, "used": 0, "reserved": reserved}
            _write(self.folder / f"gpu-{index}", {**fields, "util": 0, "temp": 40})
        _write(self.folder / "host", {"driver": driver, "init": 0, "gpus": gpus})

    def set(self, index: int | str, *, lost: bool | None = None, **fields: int | str | None) -> None:
        """Change the answers of a GPU or MIG device.

        ``index``: number or UUID of the device.
        ``lost``: True if the GPU has fallen off the bus, so that each call for it fails.
        ``fields``: new values. None removes a field.

        - ``name``, and ``total``, ``reserved`` and ``used`` (by programs that are not simulated) in bytes
        - ``util`` in percent, ``temp`` in degrees Celsius
        - ``error``: code returned by each call
        - ``hidden=1``: processes are listed without their memory
        - ``unlisted=1``: no process is listed
        - ``shift``: number added to all pids, as if they were from another namespace
        - ``persistence``: mode, 0 or 1
        - ``compute_mode``: 3 is EXCLUSIVE_PROCESS
        - ``mps=1``: processes are clients of MPS
        """
        if lost is not None:
            fields["error"] = GPU_IS_LOST if lost else 0
        _update(self._file(index), fields)

    def program(
        self,
        index: int | str,
        nbytes: int,
        pid: int | None = None,
        name: str = "/usr/bin/other",
        graphics: bool = False,
        mps: bool = False,
    ) -> Program:
        """Let another program use memory until its ``end()``. By default its pid is that of no process."""
        number = next(_COUNTER)
        pid = _FIRST_PROGRAM + number if pid is None else pid
        gpu, mig = _find(self.folder, index)
        kind = "graphics" if graphics else "mps" if mps else "program"
        path = self.folder / "use" / f"{kind}-{os.getpid()}-{number}"
        _replace(path, f"{pid} {gpu} {mig} {nbytes} {name}\n".encode())
        return Program(pid, path)

    def fail(self, function: str, code: int | None, index: int | str | None = None) -> None:
        """Let an NVML function fail with a code, on one GPU or on all GPUs. None ends the failure."""
        path = self.folder / "host" if index is None else self._file(index)
        _update(path, {f"fail {function}": code})

    def hang(self, function: str, pid: int = 0) -> None:
        """Let an NVML function block until :meth:`go_on`, in one process, or in all if ``pid`` is 0."""
        _replace(self.folder / "hang", f"{function} {pid}\n".encode())

    def hanging(self) -> set[int]:
        """Return the processes in which a function has hung since the last :meth:`go_on`."""
        return {int(path.name.rpartition("-")[2]) for path in self.folder.glob("hanging-*")}

    def go_on(self) -> None:
        """Let blocked functions continue."""
        (self.folder / "hang").unlink(missing_ok=True)
        for path in self.folder.glob("hanging-*"):
            path.unlink()

    def count_calls(self) -> None:
        """Start counting the calls of NVML functions in all processes."""
        shutil.rmtree(self.folder / "calls", ignore_errors=True)
        (self.folder / "calls").mkdir()
        _update(self.folder / "host", {"count": 1})

    def calls(self) -> dict[int, Counter[str]]:
        """Return the number of calls of each function since :meth:`count_calls`, by pid."""
        return {
            int(path.name): Counter(path.read_text().split()) for path in (self.folder / "calls").iterdir()
        }

    def set_cuda(self, version: int) -> None:
        """Set the newest CUDA version that the driver supports, in NVML's format: 12040 for 12.4."""
        _update(self.folder / "host", {"cuda": version})

    def fail_init(self, code: int) -> None:
        """Let ``nvmlInit`` return a code: DRIVER_NOT_LOADED, NO_PERMISSION, LIB_RM_VERSION_MISMATCH ..."""
        _update(self.folder / "host", {"init": code})

    def set_count(self, gpus: int) -> None:
        """Show only the first ``gpus`` GPUs."""
        _update(self.folder / "host", {"gpus": gpus})

    def mig(self, index: int, sizes: list[int] | None) -> list[str]:
        """Turn MIG mode on, with devices of these sizes in bytes. Returns their UUIDs. None turns it off."""
        card = self.folder / f"gpu-{index}"
        if sizes is None:
            _update(card, {"mig": 0, "instances": 0})
            return []
        uuids = [f"MIG-{uuid.uuid5(_NAMESPACE, f'{index}/{mig}')}" for mig in range(len(sizes))]
        model = _read(card)["name"]
        for mig, (mig_uuid, size) in enumerate(zip(uuids, sizes, strict=True)):
            name = f"{model} MIG {mig + 1}g.{size // GIB}gb"
            fields: Fields = {"uuid": mig_uuid, "name": name, "total": size, "used": 0, "reserved": 0}
            _write(self.folder / f"gpu-{index}-{mig}", fields)
        _update(card, {"mig": 1, "instances": len(sizes)})
        return uuids

    def used(self, index: int | str) -> int:
        """Return the bytes in use on a GPU of this host. Its own processes can call :func:`used` instead."""
        return _used(self.folder, index)

    def status(self) -> State:
        """Return the state of the ledger, read with its mutex held."""
        # Processes that only use the stub must not import the package.
        from flower_gpu.leases.ledger import Ledger
        from flower_gpu.leases.ledger_folder import LedgerFolder

        return Ledger(LedgerFolder(self.ledger)).status()

    def until(self, condition: Callable[[State], Any]) -> State:
        """Wait until the state of the ledger meets a condition, and return that state."""

        def matching_state() -> State | None:
            state = self.status()
            return state if condition(state) else None

        state = until(matching_state, self.status)
        assert state is not None
        return state

    def observed(self) -> AbstractContextManager[list[dict[str, dict[str, int]]]]:
        """Record continuously the bytes that each lease holds of each GPU."""
        from ledger_observer import observed

        return observed(
            self.ledger,
            lambda holders: {
                entry.id: {part.uuid: part.memory_bytes for part in entry.gpu_parts}
                for entry in holders
                if entry.gpu_parts
            },
        )

    def _file(self, index: int | str) -> Path:
        return _device_file(self.folder, *_find(self.folder, index))


def allocate(index: int | str, nbytes: int) -> None:
    """Let this process use ``nbytes`` bytes of a GPU or MIG device, given by number or UUID.

    A later call replaces the number of bytes. The memory is free again when the process has ended, even if it
    was killed. No lock is needed, because each process has its own file.
    """
    folder = Path(os.environ["NVML_STUB_DIR"])
    pid = os.getpid()
    gpu, mig = _find(folder, index)
    path = folder / "use" / f"{pid}.{_start_of(pid)}"
    lines = path.read_text().splitlines() if path.exists() else []
    own_prefix = f"{pid} {gpu} {mig} "
    lines = [line for line in lines if not line.startswith(own_prefix)]
    if nbytes:
        lines.append(f"{own_prefix}{nbytes}")
    if lines:
        _replace(path, "".join(f"{line}\n" for line in lines).encode())
    else:
        path.unlink(missing_ok=True)


def used(index: int | str) -> int:
    """Return the bytes in use on a GPU by simulated processes that still exist and by other programs.

    This count is independent of that of the library, so tests can compare the two.
    """
    return _used(Path(os.environ["NVML_STUB_DIR"]), index)


def _used(folder: Path, index: int | str) -> int:
    gpu, mig = _find(folder, index)
    total = int(_read(_device_file(folder, gpu, mig)).get("used", "0"))
    for path in (folder / "use").iterdir():
        if path.name[0].isdigit():
            pid, _, start = path.name.partition(".")
            if not start.isdigit() or _start_of(int(pid)) != start:
                continue
        elif not path.name.startswith(("program-", "graphics-", "mps-")):
            continue
        try:
            lines = path.read_text().splitlines()
        except FileNotFoundError:
            continue
        for line in lines:
            _, on_gpu, on_mig, nbytes = line.split()[:4]
            if int(on_gpu) == gpu and mig in (_NO_MIG, int(on_mig)):
                total += int(nbytes)
    return total


def _start_of(pid: int) -> str | None:
    """Return the start time of a process in clock ticks, or None if it has ended.

    It distinguishes the process from a later one with the same pid.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, *fields = text.rpartition(")")[2].split()
    return None if state in "ZX" else fields[18]


def _find(folder: Path, index: int | str) -> tuple[int, int]:
    """Return the number of the card and of its MIG device, which is -1 for the card itself."""
    if isinstance(index, int):
        return index, _NO_MIG
    for path in folder.glob("gpu-*"):
        if _read(path)["uuid"] == index:
            gpu, _, mig = path.name.removeprefix("gpu-").partition("-")
            return int(gpu), int(mig) if mig else _NO_MIG
    raise LookupError(f"there is no stub GPU {index}")


def _device_file(folder: Path, gpu: int, mig: int) -> Path:
    return folder / (f"gpu-{gpu}" if mig == _NO_MIG else f"gpu-{gpu}-{mig}")


def _read(path: Path) -> dict[str, str]:
    """Return the fields of a file, with the rest of each line as the value."""
    fields = {}
    for line in path.read_text().splitlines():
        key, _, value = line.partition(" ")
        if key == "fail":
            function, _, value = value.partition(" ")
            key = f"fail {function}"
        fields[key] = value
    return fields


def _write(path: Path, fields: Fields) -> None:
    _replace(path, "".join(f"{key} {value}\n" for key, value in fields.items()).encode())


def _update(path: Path, changes: Mapping[str, int | str | None]) -> None:
    fields = {**_read(path), **changes}
    _write(path, {key: value for key, value in fields.items() if value is not None})


def _replace(path: Path, content: bytes) -> None:
    """Write a file atomically, so that a reader sees either the old or the new content."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{next(_COUNTER)}")
    temporary.write_bytes(content)
    temporary.replace(path)
