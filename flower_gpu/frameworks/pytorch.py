"""PyTorch: random numbers, threads, flags, and cuDNN's libraries. :mod:`.pytorch_memory` caps its memory."""

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
from flower_gpu.gpu import drivers

#: With 1, ``is_available()`` uses NVML and does not start CUDA, unless NVML fails.
NVML_CHECK: Final = "PYTORCH_NVML_BASED_CUDA_CHECK"

# Flags of PyTorch's modules. Some versions lack some of them.
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


# Variables that cuDNN's libraries read only while they are loaded (observed with cuDNN 9.24)
_READ_BY_CUDNN: Final = (
    *(f"CUDNN_LOG{what}_DBG" for what in ("INFO", "WARN", "ERR", "LEVEL", "DEST")),
    *("CUDNN_LIB_CONFIG", "CUDNN_ERRSRC_DBG", "CUDNN_STRICT_DBG", "CUDNN_CONV_WSCAP_DBG"),
    *("CUDNN_FORCE_JIT_DBG", "CUDNN_JIT_FLAGS_DBG", "CUDNN_SKIPHEUR_DBG", "CUDNN_RNN_WS_SIZE_DBG"),
    *("CUDNN_PREFER_SM_COUNT_DBG", "CUDNN_MALLOCCOUNT_DBG", "CUDNN_FREECOUNT_DBG", "CUDNN_GA10X_SMEM_DBG"),
    *("CUDNN_FORT_FFMA_CONV1D_SELECT", "CASK_LOG_INFO", "CASK_ENHANCED_API_LOGGING"),
    *("NVRTC_DISABLE_CONCURRENT_NVVM", "NVRTC_INTERNAL_GLOBAL_LOCK", "NVRTC_DISABLE_PCH"),
    "NVRTC_PCH_HEAP_SIZE",
)

# Parts of cuDNN in loading order: each finds its dependencies among the earlier ones, independent of
# LD_LIBRARY_PATH. Two parts are left out. Before cuDNN 9.26, engines_tensor_ir is not initialised correctly
# if other code loads it (google-ml-infra/rules_ml_toolchain#292), and PyTorch does not use ext.
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


# "Avoiding nondeterministic algorithms" in PyTorch's notes on reproducibility, and cuBLAS's notes on CUDA
# 10.2
_WORKSPACE: Final = "CUBLAS_WORKSPACE_CONFIG"
_DETERMINISTIC_WORKSPACES: Final = (":4096:8", ":16:8")
_NO_ALGORITHM: Final = re.compile(r"(\S+) does not have a deterministic implementation")
# cudaErrorInvalidDevice; torch.cuda.get_device_properties().
_NO_SUCH_DEVICE: Final = re.compile(r"invalid device (ordinal|id)\b", re.IGNORECASE)
_NO_WORKSPACE: Final = "this operation is not deterministic because it uses CuBLAS"


class PyTorch(Framework):
    """PyTorch."""

    name, module, last = "PyTorch", "torch", "cuda"
    imported_in_use = ("torch._dynamo",)  # imported by optimizers at their first step
    read_on_gpu = _READ_BY_CUDNN
    set_by_modules = (SETTINGS, OLD_SETTINGS)

    def says_out_of_memory(self, error: BaseException, text: str) -> bool:
        """Return True for PyTorch's own class. Its other CUDA errors are recognised by CUDA's texts."""
        return is_of(error, "torch", "OutOfMemoryError")

    def says_no_such_device(self, text: str) -> bool:
        """Return True for the text of CUDA, or of PyTorch's own check."""
        return _NO_SUCH_DEVICE.search(text) is not None

    def cap_variables(self, fraction: str, environ: Mapping[str, str]) -> dict[str, str]:
        """Set the cap in PyTorch's settings. Versions without that setting get the cap when CUDA starts."""
        # A client has 1, so that is_available() does not start CUDA. A worker must find out if CUDA works.
        variables = {NVML_CHECK: "0"}
        if knows_fraction(installed_version()):
            variables[SETTINGS] = settings_with_cap(fraction, environ)
            # The old variable takes precedence. PyTorch accepts both with equal values.
            if OLD_SETTINGS in environ:
                variables[OLD_SETTINGS] = variables[SETTINGS]
        return variables

    def cap_rules(self, fraction: str, fixed: Container[str]) -> dict[str, Rule]:
        """Merge the user's settings with the cap."""
        return {name: partial(_with_cap, fraction, name) for name in self.set_by_modules if name in fixed}

    def hold(self, caps: Sequence[Cap], *, is_new: bool) -> Hold | None:
        """Cap the allocator as soon as CUDA starts."""
        hold = pytorch_memory.AllocatorHold(caps)
        hold.apply()
        # A PyTorch that was imported earlier may have read the environment of the fork server or the client.
        if not is_new:
            hold.follow_settings()
        return hold

    def loaded_on_gpu(self) -> list[str]:
        """Return the libraries of cuDNN. The import of PyTorch loads only the first of them."""
        return _cudnn_files()

    def figures(self) -> tuple[Figures, ...] | None:
        """Return the allocator's figures."""
        return pytorch_memory.figures()

    def reset_peaks(self) -> None:
        """Reset the peaks of the allocator on each GPU."""
        for index in range(len(self.reserved_bytes() or ())):
            sys.modules["torch"].cuda.reset_peak_memory_stats(index)

    def free_cached(self) -> None:
        """Return the allocator's unused blocks to the driver."""
        sys.modules["torch"].cuda.empty_cache()  # has no effect before CUDA has started

    def reserved_bytes(self) -> list[int] | None:
        """Return the allocator's own count, which can be read at any time, even during a graph capture."""
        cuda = sys.modules["torch"].cuda
        if not cuda.is_initialized():
            return None
        return [cuda.memory_reserved(index) for index in range(cuda.device_count())]

    def no_cuda(self) -> dict[str, Any] | None:
        """Return why PyTorch cannot use a GPU, or None. May start NVML or the CUDA driver."""
        reason = pytorch_memory.no_cuda_reason()
        torch: Any = sys.modules["torch"]
        versions = {"torch": str(torch.__version__), "torch_cuda": torch.version.cuda}
        return None if reason is None else {"reason": reason, **versions}

    def lacks(self) -> str | None:
        """Return the private names missing from this version of PyTorch."""
        return pytorch_memory.lacks()

    def threads(self) -> Threads:
        """Return the OpenMP threads. With MKL, their initial number is MKL's number."""
        torch: Any = sys.modules["torch"]
        has_mkl = bool(torch.backends.mkl.is_available())
        variables = ("MKL_NUM_THREADS",) if has_mkl else ()
        return Threads(torch.get_num_threads, torch.set_num_threads, variables, at_most_cores=has_mkl)

    def seed(self, seed: int) -> None:
        """Seed the generators of the CPU and of all GPUs."""
        torch: Any = sys.modules["torch"]
        # Not torch.manual_seed: before CUDA has started, it records the stack for each kind of device, which
        # takes longer than the training of a small client.
        number = seed & (1 << 63) - 1
        torch.default_generator.manual_seed(number)
        if not drivers.hides_all(os.environ):
            torch.cuda.manual_seed_all(number)

    def deterministic_variables(self, threads: int, environ: Mapping[str, str]) -> dict[str, str]:
        """Fix the algorithms of cuBLAS and MKL, and let the compiler choose kernels without measurements."""
        workspace = environ.get(_WORKSPACE, "")
        is_deterministic = workspace in _DETERMINISTIC_WORKSPACES
        return {
            _WORKSPACE: workspace if is_deterministic else _DETERMINISTIC_WORKSPACES[0],
            # MKL's "Conditional Numerical Reproducibility": the same bits for any alignment of arrays in
            # memory
            "MKL_CBWR": environ.get("MKL_CBWR") or "AUTO",
            "TORCHINDUCTOR_DETERMINISTIC": "1",
        }

    def be_deterministic(self) -> None:
        """Turn deterministic algorithms on. Operations without one raise an error."""
        torch: Any = sys.modules["torch"]
        # Not use_deterministic_algorithms(), which imports the compiler and takes 2 seconds.
        torch.set_deterministic_debug_mode("error")
        torch.backends.cudnn.benchmark = False

    def not_deterministic(self, text: str) -> str | None:
        """Return the operation in the text of PyTorch's RuntimeError, or None."""
        if (match := _NO_ALGORITHM.search(text)) is not None:
            return f"PyTorch's {match[1]} has no deterministic implementation on this device"
        return "cuBLAS has no deterministic workspace" if _NO_WORKSPACE in text else None

    def random_state(self) -> bytes:
        """Return the state of the generator on the CPU."""
        state: bytes = sys.modules["torch"].get_rng_state().numpy().tobytes()
        return state

    def set_random_state(self, state: bytes) -> None:
        """Restore the state of the generator on the CPU."""
        torch: Any = sys.modules["torch"]
        torch.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))

    def seed_fork(self) -> None:
        """Seed the generator on the CPU. The worker creates CUDA's generators itself."""
        sys.modules["torch"].default_generator.seed()

    def on_first_step(self, then: Callable[[], object]) -> Callable[[], None] | None:
        """Call a function at the next step of any optimizer, and return a function that cancels the call."""
        has_stepped = False

        def hook(*_: object) -> None:
            # A hook cannot remove itself while PyTorch iterates over the hooks, so it does nothing from then
            # on.
            nonlocal has_stepped
            if not has_stepped:
                has_stepped = True
                then()

        # Not torch.optim.optimizer: torch.optim deletes that name.
        register = getattr(sys.modules.get("torch.optim.optimizer"), "register_optimizer_step_pre_hook", None)
        return None if register is None else register(hook).remove

    def settings(self) -> Iterator[Setting]:
        """Yield the flags, the number of threads and the default device."""
        torch: Any = sys.modules["torch"]
        yield from self._flags()
        yield Setting(torch.get_num_threads, torch.set_num_threads)
        yield Setting(lambda: sys.float_info.min / 2 == 0, torch.set_flush_denormal)
        yield Setting(torch.get_default_device, torch.set_default_device)

    def taken_over(self) -> Iterator[Setting]:
        """Yield the flags and the default device. The lease of a worker decides its number of threads."""
        yield Setting(_default_device, _set_default_device)
        yield from self._flags()

    def _flags(self) -> Iterator[Setting]:
        """Yield the flags: precision, determinism, gradients, default dtype, autocast, and a few more."""
        torch: Any = sys.modules["torch"]
        yield Setting(torch.get_default_dtype, torch.set_default_dtype)
        yield Setting(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision)
        for path, names in _FLAGS:
            owner = torch
            for part in path.split("."):
                owner = getattr(owner, part, None)
            yield from (
                Setting(partial(getattr, owner, name), partial(setattr, owner, name))
                for name in names
                if hasattr(owner, name)
            )
        # Not use_deterministic_algorithms(), which imports the compiler and takes 2 seconds.
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
    """Return the default device of this thread without an index, or None if none was set.

    ``torch.get_default_device`` would start CUDA to find the index. In a worker, the index is that of its
    lease.
    """
    context = getattr(pytorch_memory.private("_GLOBAL_DEVICE_CONTEXT"), "device_context", None)
    return None if context is None else context.device.type


def _set_default_device(kind: Any) -> None:
    """Set the default device, unless it is a GPU and this worker has none."""
    if kind != "cuda" or not drivers.hides_all(os.environ):
        sys.modules["torch"].set_default_device(kind)


@cache
def installed_version() -> str:
    """Return the installed version of PyTorch, or an empty text."""
    from importlib import metadata  # a slow import

    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return ""


def _with_cap(fraction: str, name: str, text: str) -> str:
    return settings_with_cap(fraction, {name: text})


def _cudnn_files() -> list[str]:
    """Return the library files of the cuDNN that this process has loaded, or an empty list.

    Frameworks are linked with the first library. cuDNN loads the others at its first use, some 600 MB in each
    process. They are in the same folder, so another cuDNN on the host cannot be confused with this one.
    """
    for line in Path("/proc/self/maps").read_text().splitlines():
        _, _, name = line.rpartition("/")
        if match := _FIRST_CUDNN.fullmatch(name):
            folder = Path(line.split(maxsplit=5)[5]).parent
            return [str(folder / f"libcudnn_{part}.so.{match[1]}") for part in _CUDNN_PARTS]
    return []
