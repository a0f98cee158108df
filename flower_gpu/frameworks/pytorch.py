"""PyTorch: its random numbers, its threads, its flags, and cuDNN's libraries.

Its memory, and the cap on that, are in :mod:`.pytorch_memory`.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

from flower_gpu.frameworks import pytorch_memory
from flower_gpu.frameworks.framework import Cap, Figures, Framework, Hold, Rule, Setting, Threads, is_of
from flower_gpu.frameworks.pytorch_memory import OLD_SETTINGS, SETTINGS, knows_fraction, settings_with_cap

#: Set to 1, ``is_available()`` asks NVML and does not start CUDA, as long as NVML works.
NVML_CHECK: Final = "PYTORCH_NVML_BASED_CUDA_CHECK"

# Flags of torch.backends and below. Not everything is there in every version.
_PRECISION: Final = ("fp32_precision",)
_FLAGS: Final = (
    ("backends", _PRECISION),
    ("backends.cuda.matmul", ("fp32_precision", "allow_tf32", "allow_fp16_reduced_precision_reduction")),
    ("backends.cuda.matmul", ("allow_bf16_reduced_precision_reduction", "allow_fp16_accumulation")),
    ("backends.cudnn", ("enabled", "benchmark", "benchmark_limit", "deterministic")),
    ("backends.cudnn", ("fp32_precision", "allow_tf32")),
    ("backends.cudnn.conv", _PRECISION),
    ("backends.cudnn.rnn", _PRECISION),
    ("backends.mkldnn", ("enabled", "deterministic", "fp32_precision", "allow_tf32")),
    ("backends.mkldnn.matmul", _PRECISION),
    ("backends.mkldnn.conv", _PRECISION),
    ("backends.mkldnn.rnn", _PRECISION),
    ("utils.deterministic", ("fill_uninitialized_memory",)),
)


# Variables that cuDNN's libraries read while they are loaded, and never again (seen in cuDNN 9.24).
_READ_BY_CUDNN: Final = (
    *(f"CUDNN_LOG{what}_DBG" for what in ("INFO", "WARN", "ERR", "LEVEL", "DEST")),
    *("CUDNN_LIB_CONFIG", "CUDNN_ERRSRC_DBG", "CUDNN_STRICT_DBG", "CUDNN_CONV_WSCAP_DBG"),
    *("CUDNN_FORCE_JIT_DBG", "CUDNN_JIT_FLAGS_DBG", "CUDNN_SKIPHEUR_DBG", "CUDNN_RNN_WS_SIZE_DBG"),
    *("CUDNN_PREFER_SM_COUNT_DBG", "CUDNN_MALLOCCOUNT_DBG", "CUDNN_FREECOUNT_DBG", "CUDNN_GA10X_SMEM_DBG"),
    *("CUDNN_FORT_FFMA_CONV1D_SELECT", "CASK_LOG_INFO", "CASK_ENHANCED_API_LOGGING"),
    *("NVRTC_DISABLE_CONCURRENT_NVVM", "NVRTC_INTERNAL_GLOBAL_LOCK", "NVRTC_DISABLE_PCH"),
    "NVRTC_PCH_HEAP_SIZE",
)

# In this order each finds what it needs among those before it, whatever is in LD_LIBRARY_PATH. Two more are
# left to cuDNN: before 9.26 engines_tensor_ir is not set up rightly when somebody else loads it
# (google-ml-infra/rules_ml_toolchain#292), and PyTorch calls nothing of ext.
_CUDNN_PARTS: Final = (
    "graph",
    "ops",
    "cnn",
    "adv",
    "heuristic",
    "engines_precompiled",
    "engines_runtime_compiled",
)

_FIRST_CUDNN: Final = re.compile(r"libcudnn\.so\.(\d+)(\.\d+)*")


# "Avoiding nondeterministic algorithms" in PyTorch's notes on reproducibility, and cuBLAS's on CUDA 10.2.
_WORKSPACE: Final = "CUBLAS_WORKSPACE_CONFIG"
_DETERMINISTIC_WORKSPACES: Final = (":4096:8", ":16:8")
_NO_ALGORITHM: Final = re.compile(r"(\S+) does not have a deterministic implementation")
# cudaErrorInvalidDevice; torch.cuda.get_device_properties().
_NO_SUCH_DEVICE: Final = re.compile(r"invalid device (ordinal|id)\b", re.IGNORECASE)
_NO_WORKSPACE: Final = "this operation is not deterministic because it uses CuBLAS"


class PyTorch(Framework):
    """PyTorch."""

    name, module, last = "PyTorch", "torch", "cuda"
    imported_in_use = ("torch._dynamo",)  # by its optimizers, at their first step
    read_on_gpu = _READ_BY_CUDNN
    set_by_modules = (SETTINGS, OLD_SETTINGS)

    def says_out_of_memory(self, error: BaseException, text: str) -> bool:
        """Tell by its class. Other errors of CUDA that it raises have CUDA's text, which all have."""
        return is_of(error, "torch", "OutOfMemoryError")

    def says_no_such_device(self, text: str) -> bool:
        """Look for the text of CUDA, or of the check that PyTorch itself makes."""
        return _NO_SUCH_DEVICE.search(text) is not None

    def cap_variables(self, fraction: str, environ: Mapping[str, str]) -> dict[str, str]:
        """Set the cap where this PyTorch reads it; an older one gets it only when CUDA starts."""
        # In a client 1 keeps is_available() from starting CUDA; a worker must know whether CUDA works.
        variables = {NVML_CHECK: "0"}
        if knows_fraction(installed_version()):
            variables[SETTINGS] = settings_with_cap(fraction, environ)
            if OLD_SETTINGS in environ:  # it would win; PyTorch does not mind both when they say the same
                variables[OLD_SETTINGS] = variables[SETTINGS]
        return variables

    def cap_rules(self, fraction: str, fixed: Container[str]) -> dict[str, Rule]:
        """Put settings of the user's own together with the cap."""
        return {name: partial(_with_cap, fraction, name) for name in self.set_by_modules if name in fixed}

    def hold(self, caps: Sequence[Cap], on_start: Callable[[], None], *, is_new: bool) -> Hold | None:
        """Hold its allocator to caps from the moment on in which CUDA starts."""
        hold = pytorch_memory.AllocatorHold(caps, on_start)
        hold.apply()
        if not is_new:  # it may have read another process's environment: the fork server's, or the client's
            hold.follow_settings()
        return hold

    def loaded_on_gpu(self) -> list[str]:
        """Return cuDNN's: importing PyTorch loads the first of them only."""
        return _cudnn_files()

    def figures(self) -> tuple[Figures, ...] | None:
        """Return its allocator's figures."""
        return pytorch_memory.figures()

    def reset_peaks(self) -> None:
        """Let its allocator count its highest figures anew."""
        for index in range(len(self.reserved_bytes() or ())):
            sys.modules["torch"].cuda.reset_peak_memory_stats(index)

    def free_cached(self) -> None:
        """Free the blocks of its allocator that have no tensor in them."""
        sys.modules["torch"].cuda.empty_cache()  # nothing, where CUDA has not started

    def reserved_bytes(self) -> list[int] | None:
        """Ask the allocator and not the driver: that works at any time, also while CUDA captures a graph."""
        cuda = sys.modules["torch"].cuda
        if not cuda.is_initialized():
            return None
        return [cuda.memory_reserved(index) for index in range(cuda.device_count())]

    def no_cuda(self) -> dict[str, Any] | None:
        """Ask it, and let it say why not; may start NVML, or the CUDA driver."""
        reason = pytorch_memory.no_cuda_reason()
        torch: Any = sys.modules["torch"]
        versions = {"torch": str(torch.__version__), "torch_cuda": torch.version.cuda}
        return None if reason is None else {"reason": reason, **versions}

    def lacks(self) -> str | None:
        """Return the private names that this version of PyTorch lacks."""
        return pytorch_memory.lacks()

    def threads(self) -> Threads:
        """Return its OpenMP threads; it begins with the count of MKL, where it has that."""
        torch: Any = sys.modules["torch"]
        has_mkl = bool(torch.backends.mkl.is_available())
        variables = ("MKL_NUM_THREADS",) if has_mkl else ()
        return Threads(torch.get_num_threads, torch.set_num_threads, variables, at_most_cores=has_mkl)

    def seed(self, seed: int) -> None:
        """Seed the generators of the CPU and of all GPUs."""
        torch: Any = sys.modules["torch"]
        # Not torch.manual_seed: where CUDA has not started that writes down the stack for each kind of
        # device, which takes longer than a small client trains.
        number = seed & (1 << 63) - 1
        torch.default_generator.manual_seed(number)
        if os.environ.get("CUDA_VISIBLE_DEVICES") != "":
            torch.cuda.manual_seed_all(number)

    def deterministic_variables(self, threads: int, environ: Mapping[str, str]) -> dict[str, str]:
        """Fix the algorithms of cuBLAS and MKL, and have the compiler choose kernels without measurements."""
        own = environ.get(_WORKSPACE, "")
        return {
            _WORKSPACE: own if own in _DETERMINISTIC_WORKSPACES else _DETERMINISTIC_WORKSPACES[0],
            # Of MKL ("Conditional Numerical Reproducibility"): the same bits wherever arrays lie in memory.
            "MKL_CBWR": environ.get("MKL_CBWR") or "AUTO",
            "TORCHINDUCTOR_DETERMINISTIC": "1",
        }

    def be_deterministic(self) -> None:
        """Turn deterministic algorithms on, as an error where there is none."""
        torch: Any = sys.modules["torch"]
        # Not use_deterministic_algorithms(): that imports the compiler, which takes 2 seconds.
        torch.set_deterministic_debug_mode("error")
        torch.backends.cudnn.benchmark = False

    def not_deterministic(self, text: str) -> str | None:
        """Find the operation in the text of its RuntimeError."""
        if (found := _NO_ALGORITHM.search(text)) is not None:
            return f"PyTorch's {found[1]} has no deterministic implementation on this device"
        return "cuBLAS has no deterministic workspace" if _NO_WORKSPACE in text else None

    def random_state(self) -> bytes:
        """Return the state of the CPU's generator."""
        state: bytes = sys.modules["torch"].get_rng_state().numpy().tobytes()
        return state

    def set_random_state(self, state: bytes) -> None:
        """Set the CPU's generator."""
        torch: Any = sys.modules["torch"]
        torch.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))

    def seed_fork(self) -> None:
        """Seed the CPU's generator; CUDA's is made in the worker."""
        sys.modules["torch"].default_generator.seed()

    def on_first_step(self, then: Callable[[], object]) -> Callable[[], None] | None:
        """Have a function called at the next step of any optimizer. A hook must not remove itself."""
        has_stepped = False

        def hook(*_: object) -> None:
            nonlocal has_stepped
            if not has_stepped:
                has_stepped = True
                then()

        # Not torch.optim.optimizer: torch.optim deletes that name.
        register = getattr(sys.modules.get("torch.optim.optimizer"), "register_optimizer_step_pre_hook", None)
        return None if register is None else register(hook).remove

    def settings(self) -> Iterator[Setting]:
        """Yield its flags, its threads and its default device."""
        torch: Any = sys.modules["torch"]
        yield from self._flags()
        yield Setting(torch.get_num_threads, torch.set_num_threads)
        yield Setting(lambda: sys.float_info.min / 2 == 0, torch.set_flush_denormal)
        if hasattr(torch, "get_default_device"):
            yield Setting(torch.get_default_device, torch.set_default_device)

    def taken_over(self) -> Iterator[Setting]:
        """Yield its flags and its default device; the threads of a worker are those of its lease."""
        yield Setting(_default_device, _set_default_device)
        yield from self._flags()

    def _flags(self) -> Iterator[Setting]:
        """Yield its flags: precision, determinism, gradients, default type, autocast, and a few more."""
        torch: Any = sys.modules["torch"]
        yield Setting(torch.get_default_dtype, torch.set_default_dtype)
        yield Setting(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision)
        for place, names in _FLAGS:
            owner = torch
            for part in place.split("."):
                owner = getattr(owner, part, None)
            yield from (
                Setting(partial(getattr, owner, name), partial(setattr, owner, name))
                for name in names
                if hasattr(owner, name)
            )
        # Not use_deterministic_algorithms(): that imports the compiler, which takes 2 seconds.
        yield Setting(torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode)
        yield Setting(torch.is_grad_enabled, torch.set_grad_enabled)
        yield Setting(torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly)
        for kind in ("flash", "mem_efficient", "math", "cudnn"):
            get = getattr(torch.backends.cuda, f"{kind}_sdp_enabled", None)
            if get is not None:
                yield Setting(get, getattr(torch.backends.cuda, f"enable_{kind}_sdp"))
        for device in ("cpu", "cuda"):
            for name in ("enabled", "dtype"):
                get = getattr(torch, f"is_autocast_{name}" if name == "enabled" else f"get_autocast_{name}")
                yield Setting(partial(get, device), partial(getattr(torch, f"set_autocast_{name}"), device))
        multiprocessing: Any = sys.modules.get("torch.multiprocessing")
        if multiprocessing is not None:
            yield Setting(multiprocessing.get_sharing_strategy, multiprocessing.set_sharing_strategy)


def _default_device() -> Any:
    """Return the default device of this thread, without an index; None where none was set.

    ``torch.get_default_device`` would start CUDA, to find the index. In a worker it is that of its lease.
    """
    context = getattr(pytorch_memory.private("_GLOBAL_DEVICE_CONTEXT"), "device_context", None)
    return None if context is None else context.device.type


def _set_default_device(kind: Any) -> None:
    """Set the default device, unless it is a GPU and this worker has none."""
    if kind != "cuda" or os.environ.get("CUDA_VISIBLE_DEVICES") != "":
        sys.modules["torch"].set_default_device(kind)


@cache
def installed_version() -> str:
    """Return the version of PyTorch that is installed; empty where there is none."""
    from importlib import metadata  # slow to import

    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return ""


def _with_cap(fraction: str, name: str, text: str) -> str:
    return settings_with_cap(fraction, {name: text})


def _cudnn_files() -> list[str]:
    """Return the files of cuDNN's libraries; empty where this process has none.

    cuDNN loads most of them when it is first used: some 600 MB, in each process anew. They
    lie beside the first one, which frameworks are linked with. Another cuDNN of the host is another one.
    """
    for line in Path("/proc/self/maps").read_text().splitlines():
        _, _, name = line.rpartition("/")
        if found := _FIRST_CUDNN.fullmatch(name):
            folder = Path(line.split(maxsplit=5)[5]).parent
            return [str(folder / f"libcudnn_{part}.so.{found[1]}") for part in _CUDNN_PARTS]
    return []
