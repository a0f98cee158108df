"""Simulated GPUs for the real PyTorch: a stand-in for CUDA's runtime and driver.

An unmodified CUDA build of PyTorch finds the GPUs of a :class:`Host`, creates contexts and allocates there.
README.md says what is simulated and what is not::

    host = Host(tmp_path / "host", gpus=2, total=16 * GIB)
    host.set(0, context_ms=400)
    subprocess.run(command, env={**os.environ, **host.env})
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import platform
import re
import runpy
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import nvml_stub
from nvml_stub import GIB

__all__ = ["GIB", "MIB", "Host", "compiled", "reason_not_to_run"]

MIB = 2**20

_FOLDER = Path(__file__).absolute().parent
_SOURCES = ("cards.h", "cards.c", "runtime.c", "driver.c", "crt/host_defines.h")
_DRIVER = "libcuda.so.1"
# A function of CUDA's runtime or driver that PyTorch's libraries import.
_IMPORTED = re.compile(r"^ *U ((?:__)?cuda[A-Z]\w+)@|^ *U (cu[A-Z]\w+)$", re.MULTILINE)
# A function that PyTorch's allocator looks up by name. PyTorch before 2.8 requires all of them.
_LOOKED_UP = re.compile(rb"(?<=\0)cu[A-Z]\w+(?=\0)")
_EXPORTED = re.compile(r"^[0-9a-f]+ T (\w+)$", re.MULTILINE)


class Host(nvml_stub.Host):
    """A host with simulated GPUs that both PyTorch and NVML can use.

    ``context`` is the memory of a CUDA context in bytes. A ``driver`` from version 570 on starts named
    threads. All other parameters are those of :class:`nvml_stub.Host`.

    :meth:`set` accepts these further fields: ``context`` (bytes), ``context_ms`` (time to create a context)
    and ``kernel_us`` (time of each kernel). ``compute_mode=3`` refuses a second process, and ``lost=True``
    makes every later call fail.
    """

    def __init__(
        self, folder: Path, *, context: int = 450 * MIB, driver: str = "580.65.06", **options: Any
    ) -> None:
        super().__init__(folder, driver=driver, **options)
        libraries = compiled()
        self.set_cuda(1000 * int(libraries.name.rpartition("-")[2]))
        for index in range(len(self.uuids)):
            self.set(index, context=context)
        del self.env["PYTORCH_NVML_BASED_CUDA_CHECK"]
        paths = [str(libraries), self.env["LD_LIBRARY_PATH"]]
        (runtime,) = libraries.glob("libcudart.so.*")
        preload = [str(runtime), *os.environ.get("LD_PRELOAD", "").split()]
        self.env |= {"LD_LIBRARY_PATH": ":".join(paths), "LD_PRELOAD": " ".join(preload)}


def reason_not_to_run() -> str | None:
    """Return the reason why the stand-in cannot run here, or None if it can."""
    if shutil.which("cc") is None or shutil.which("nm") is None:
        return "the stand-in for CUDA needs a C compiler: apt-get install gcc"
    if _torch()[1] is None:
        return "this PyTorch is a build without CUDA"
    return None


@functools.cache
def compiled() -> Path:
    """Return the folder of the two libraries for this Python's PyTorch. They are compiled only once.

    Raises
    ------
    RuntimeError
        If there is no C compiler, or it failed.
    """
    reason = reason_not_to_run()
    if reason is not None:
        raise RuntimeError(reason)
    folder, cuda = _torch()
    assert cuda is not None
    files = [*(_FOLDER / name for name in _SOURCES), nvml_stub.FILES, folder / "version.py"]
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]
    built = _FOLDER / "__pycache__" / f"{platform.machine()}-{digest}-{cuda.partition('.')[0]}"
    if not built.exists():
        built.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=built.parent) as new:
            _compile(Path(new), folder, cuda)
            compiled_folder = Path(new, "lib")
            try:
                compiled_folder.rename(built)
            # Another process may have been faster.
            except OSError:
                if not built.exists():
                    raise
    return built


def _torch() -> tuple[Path, str | None]:
    """Return PyTorch's folder and the CUDA it was built for, without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return Path(), None
    folder = Path(spec.origin).parent
    cuda: str | None = runpy.run_path(str(folder / "version.py"))["cuda"]
    return folder, cuda


def _compile(into: Path, torch: Path, cuda: str) -> None:
    major, minor = cuda.split(".")[:2]
    # The layout of the struct with a GPU's properties depends on the CUDA version that PyTorch was built
    # with.
    folders = [torch.parent / "nvidia" / name / "include" for name in (f"cu{major}", "cuda_runtime")]
    headers = next((folder for folder in folders if (folder / "driver_types.h").exists()), None)
    if headers is None:
        raise RuntimeError(f"no headers of CUDA's runtime in {folders[0]} or {folders[1]}")
    flags = ["-std=gnu11", "-O1", "-g", "-fPIC", "-Wall", "-Wextra", "-Werror"]
    flags += [
        "-Wno-format-truncation",
        "-Wno-cast-function-type",
        f"-DCUDART_VERSION={int(major) * 1000 + int(minor) * 10}",
    ]
    flags += [f"-I{_FOLDER}", "-isystem", str(headers)]
    for name in ("cards", "runtime", "driver"):
        _run(["cc", *flags, "-c", str(_FOLDER / f"{name}.c"), "-o", str(into / f"{name}.o")])
    libraries = [*(torch / "lib").glob("lib*.so"), *torch.glob("_C.*.so")]
    imported = _IMPORTED.findall(_run(["nm", "-D", "--undefined-only", *map(str, libraries)]))
    lib = into / "lib"
    lib.mkdir()
    runtime = f"libcudart.so.{major}"
    version = into / "version"
    version.write_text(f"{runtime} {{ global: *; }};\n")
    objects = [*_with_missing(into, {name for name, _ in imported}, "cards", "runtime")]
    shared = ["cc", "-shared", f"-Wl,-soname,{runtime}", f"-Wl,--version-script={version}"]
    _run([*shared, "-o", str(lib / runtime), *objects, "-ldl", "-lpthread"])
    looked_up = _LOOKED_UP.findall((torch / "lib/libc10_cuda.so").read_bytes())
    driver = {name for _, name in imported} | {name.decode() for name in looked_up}
    objects = [*_with_missing(into, driver, "driver")]
    shared = ["cc", "-shared", f"-Wl,-soname,{_DRIVER}"]
    _run([*shared, "-o", str(lib / _DRIVER), *objects, str(lib / runtime)])


def _with_missing(folder: Path, imported: set[str], *names: str) -> list[str]:
    """Return objects, plus an object in which all other imported functions return NOT_SUPPORTED."""
    objects = [str(folder / f"{name}.o") for name in names]
    exported = set(_EXPORTED.findall(_run(["nm", *objects])))
    missing = sorted(imported - exported - {""})
    source = folder / f"missing_{names[-1]}.c"
    source.write_text("".join(f"int {name}(void) {{ return 801; }}\n" for name in missing))
    _run(["cc", "-w", "-fPIC", "-c", str(source), "-o", str(source.with_suffix(".o"))])
    return [*objects, str(source.with_suffix(".o"))]


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[:3])} ... failed:\n{done.stderr}")
    return done.stdout
