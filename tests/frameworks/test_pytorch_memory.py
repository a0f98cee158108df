"""Memory and GPUs of a leased worker as PyTorch sees them: its cap, its allocator, and its errors.

CUDA is a stand-in, but memory, caps and errors come from the installed PyTorch.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cuda_stub
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from nvml_stub import NO_PERMISSION
from torch.utils.data import DataLoader, Dataset
from torch_version import TAKES_CAP, TELLS_SETTINGS, needs_told_settings

from flower_gpu import frameworks
from flower_gpu.frameworks import pytorch, pytorch_memory
from flower_gpu.frameworks.out_of_memory import classify, device_index, out_of_memory_in, requested_bytes

pytestmark = pytest.mark.timeout(400)

MakeHost = Callable[..., cuda_stub.Host]
RunScript = Callable[..., Any]
WriteScript = Callable[..., Path]
GIB = 2**30
# _GLOBAL_DEVICE_CONTEXT is left out: PyTorch itself needs it, and it has nothing to do with memory.
NAMES = [name for name in pytorch_memory._NOT_PUBLIC if name != "_GLOBAL_DEVICE_CONTEXT"]

WITHOUT = """
import json, os, sys
import torch
from flower_gpu import frameworks
from flower_gpu.frameworks import Cap

def remove(name):
    *parents, last = name.split(".")
    owner = torch
    for parent in parents:
        owner = getattr(owner, parent)
    if hasattr(owner, last):
        delattr(owner, last)

def fits(nbytes):
    try:
        torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError:
        return False
    return True
"""

# Each case runs in a fork, so that PyTorch is imported only once.
HELD = (
    WITHOUT
    + """
def report_without(name):
    remove(name)
    with frameworks.held_to([Cap(4 << 30, 16 << 30)]) as (hold,):
        before = hold.in_force_bytes()
        fit = [fits(3 << 30), fits(5 << 30)]
        report = {"before": before, "fit": fit, "in_force": hold.in_force_bytes()}
        report["free"] = frameworks.figures()[0].free_bytes
    return {**report, "after": fits(5 << 30), "lacks": frameworks.lacks()}

for name in sys.argv[1:]:
    if os.fork() == 0:
        print(json.dumps(report_without(name)), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0, name
"""
)


def test_without_a_private_name_pytorch_is_capped_and_the_name_is_reported(
    cuda_host: MakeHost, run_script: RunScript
) -> None:
    """A process is held to 4 of 16 GiB, first with all names of this version and then without each one."""
    host = cuda_host(gpus=1, total=16 * GIB)
    env = {**host.env, pytorch.SETTINGS: "per_process_memory_fraction:0.25" if TAKES_CAP else ""}
    completed = run_script(HELD, "nothing", *NAMES, env=env, timeout_s=280)
    lines = map(json.loads, completed.stdout.splitlines())
    reports: dict[str, Any] = dict(zip(["", *NAMES], lines, strict=True))
    report = reports.pop("")
    assert report["before"] == [4 * GIB if TELLS_SETTINGS else None]
    assert report["fit"] == [True, False] and report["after"]
    assert report["in_force"] == [4 * GIB]
    assert 0 < report["free"] < 16 * GIB
    if TAKES_CAP and not TELLS_SETTINGS:
        assert "_accelerator_getAllocatorSettings (seen in 2.12 to" in report["lacks"]
    else:
        assert report["lacks"] is None
    for name, report in reports.items():
        if name.startswith("_C._accelerator") and not TAKES_CAP:
            continue  # only used by versions that read their cap from the environment
        seen, effect = pytorch_memory._NOT_PUBLIC[name]
        assert f"torch.{name} (seen in {seen}): {effect}" in report["lacks"]
        if "_lazy_call" not in name or TAKES_CAP:
            assert report["fit"] == [True, False], name
            assert report["in_force"] == [4 * GIB], name
        assert (report["free"] is None) is (name == "_C._cuda_hasPrimaryContext")


#: Start of programs that call tasks of a module in their own folder.
CALLS = """
import json, logging, os, sys
sys.path.insert(0, os.path.dirname(__file__))
logging.basicConfig()
from flower_gpu import run_in_worker
"""

LACKING_TASK = """
import torch

del torch._C._cuda_hasPrimaryContext

def take(nbytes):
    return torch.empty(nbytes, dtype=torch.uint8, device="cuda").numel()
"""
CALLS_TWICE = (
    CALLS
    + """
for _ in range(2):
    print(run_in_worker("lacking_task:take", 1 << 30, gpu_memory="4GiB", start_method="forkserver"))
"""
)


def test_only_the_first_of_several_calls_reports_a_missing_name(
    cuda_host: MakeHost, run_script: RunScript, write_script: WriteScript
) -> None:
    write_script(LACKING_TASK, "lacking_task.py")
    completed = run_script(CALLS_TWICE, env=cuda_host(gpus=1).env, timeout_s=280)
    assert completed.stdout.split() == 2 * [str(GIB)]
    assert completed.stderr.count("has no torch._C._cuda_hasPrimaryContext") == 1


# The cap in the settings of the allocator -------------------------------------------------------------------

SETTINGS = "per_process_memory_fraction:0.250000000000"

# PyTorch reads the environment once per process, when its settings are first used, so each case needs a fork.
SCRIPT = """
import json, os, sys
import torch
from flower_gpu.frameworks import Cap, pytorch_memory

def settings_during_and_after(parsed_before, version, environ):
    os.environ.update(environ)
    if parsed_before is not None:
        torch._C._accelerator_setAllocatorSettings(parsed_before)
    if version is not None:
        torch.__version__ = version
    hold = pytorch_memory.AllocatorHold([Cap(4 << 30, 16 << 30)])
    hold.apply()
    try:
        hold.follow_settings()
    except Exception as error:
        return [repr(error), None]
    held = {
        "settings": torch._C._accelerator_getAllocatorSettings(),
        "in_force": hold.in_force_bytes(),
        "waits": hold in pytorch_memory._pending,
        "started": torch.cuda.is_initialized(),
    }
    hold.release()
    waits = hold in pytorch_memory._pending
    return [held, {"settings": torch._C._accelerator_getAllocatorSettings(), "waits": waits}]

for case in json.loads(sys.argv[1]):
    if os.fork() == 0:
        print(json.dumps(settings_during_and_after(*case)), flush=True)
        os._exit(0)
    os.wait()
"""


@needs_told_settings
def test_the_cap_follows_the_environment_and_is_removed_after_the_call(run_script: RunScript) -> None:
    cases: list[tuple[str | None, str | None, dict[str, str]]] = [
        (None, None, {"PYTORCH_ALLOC_CONF": SETTINGS}),
        (None, None, {"PYTORCH_ALLOC_CONF": SETTINGS, "PYTORCH_CUDA_ALLOC_CONF": SETTINGS}),
        # A fork of a process that has used the settings, and a process that outlives the call.
        ("max_split_size_mb:32", None, {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}),
        # This version has no such setting, so the cap is applied when CUDA starts.
        (None, "2.9.1", {}),
        (None, None, {"PYTORCH_ALLOC_CONF": "nonsense:1"}),
    ]
    done = run_script(SCRIPT, json.dumps(cases), env={"CUDA_VISIBLE_DEVICES": ""})
    read, twice, replaced, old, refused = map(json.loads, done.stdout.splitlines())
    held = {"settings": SETTINGS, "in_force": [4 * GIB], "waits": True, "started": False}
    assert read[0] == held and twice[0]["in_force"] == [4 * GIB]
    assert replaced == [
        {**held, "settings": f"max_split_size_mb:64,{SETTINGS}"},
        {"settings": "max_split_size_mb:32,per_process_memory_fraction:1.0", "waits": False},
    ]
    assert old == [{**held, "settings": "", "in_force": [None]}, {"settings": "", "waits": False}]
    assert f"PyTorch does not take PYTORCH_ALLOC_CONF='nonsense:1,{SETTINGS}' (Unrecognized" in refused[0]


@given(total=st.integers(1, 2**40), part=st.floats(0, 1.5))
def test_the_fraction_for_cuda_never_allows_more_than_the_cap(total: int, part: float) -> None:
    cap_bytes = int(total * part)
    fraction = pytorch_memory.largest_fraction(cap_bytes, total)
    assert 0 <= fraction <= 1
    assert int(fraction * total) <= cap_bytes
    assert fraction * total >= min(cap_bytes, total) - 2


def test_there_are_no_figures_before_cuda_starts() -> None:
    if torch.cuda.is_initialized():
        pytest.skip("an earlier test has initialised CUDA in this process")
    assert frameworks.figures() is None
    assert frameworks.reserved_bytes() is None
    assert not torch.cuda.is_initialized()


TEXT = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 1 has a total capacity of 15.77 GiB of which "
    "1.2 GiB is free. 3.90 GiB allowed; Of the allocated memory 3.1 GiB is allocated by PyTorch"
)


def raised_from(cause: BaseException) -> BaseException:
    try:
        raise ValueError("training failed") from cause
    except ValueError as error:
        return error


#: PyTorch has this class from 2.8 on.
AcceleratorError: type[RuntimeError] = getattr(torch, "AcceleratorError", RuntimeError)

OUT_OF_MEMORY = [
    torch.OutOfMemoryError(TEXT),
    AcceleratorError("CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA`"),
    RuntimeError("Caught OutOfMemoryError in DataLoader worker process 0.\nOriginal ...\n" + TEXT),
    raised_from(torch.OutOfMemoryError(TEXT)),
    raised_from(raised_from(torch.OutOfMemoryError(TEXT))),
    ExceptionGroup("two", [ValueError("one"), torch.OutOfMemoryError(TEXT)]),
]
OTHERS = [
    AcceleratorError("CUDA error: device-side assert triggered"),
    RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
    SystemExit("CUDA out of memory"),
]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=lambda error: type(error).__name__)
def test_errors_due_to_a_lack_of_gpu_memory_are_recognised(error: BaseException) -> None:
    assert out_of_memory_in(error)


@pytest.mark.parametrize("error", OTHERS, ids=lambda error: type(error).__name__)
def test_other_errors_are_not_taken_for_a_lack_of_gpu_memory(error: BaseException) -> None:
    assert not out_of_memory_in(error)


class Greedy(Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Any:
        raise torch.OutOfMemoryError(TEXT)


def test_an_error_that_a_dataloader_raises_again_is_recognised() -> None:
    with pytest.raises(RuntimeError) as caught:
        next(iter(DataLoader(Greedy(), num_workers=1)))
    assert out_of_memory_in(caught.value)
    assert requested_bytes(caught.value) == int(2.5 * GIB)


def test_the_gpu_is_read_from_the_text() -> None:
    assert device_index(torch.OutOfMemoryError(TEXT)) == 1
    assert device_index(RuntimeError("CUDA error: out of memory")) is None


def test_a_kind_is_certain_only_if_exactly_one_limit_was_exceeded() -> None:
    draw = random.Random(4)
    for _ in range(2000):
        reserved, requested, cap, free = (draw.randrange(8) for _ in range(4))
        kind = classify(reserved, requested, cap, free)
        assert (kind == "over_cap") == (reserved + requested > cap and requested <= free)
        assert (kind == "card_full") == (reserved + requested <= cap and requested > free)
    assert classify(3, None, 4, 1) == classify(3, 2, 4, None) == classify(None, 2, 4, 1) == "unclear"


# Counts of GPUs ---------------------------------------------------------------------------------------------

COUNTING_TASK = """
import os, warnings

def task():
    import torch
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        first_count = torch.cuda.device_count()
    pid = os.fork()
    if pid == 0:
        os._exit(int(torch.cuda._is_in_bad_fork()))
    is_bad_fork = bool(os.waitpid(pid, 0)[1])
    device = torch.zeros(1, device="cuda").device.index
    messages = [str(warning.message) for warning in caught]
    return first_count, torch.cuda.device_count(), is_bad_fork, device, messages
"""
COUNTS = (
    CALLS
    + """
for method in ("spawn", "forkserver"):
    options = {"gpu": "require", "gpu_memory": "2GiB", "start_method": method}
    print(json.dumps(run_in_worker("counting_task:task", **options)))
"""
)


def test_a_worker_counts_only_its_own_gpu(
    cuda_host: MakeHost, run_script: RunScript, write_script: WriteScript
) -> None:
    """PyTorch's own count would warn about the other card and start CUDA, which forks could not use then."""
    host = cuda_host(gpus=2)
    host.fail("nvmlDeviceGetHandleByIndex_v2", NO_PERMISSION, 0)
    write_script(COUNTING_TASK, "counting_task.py")
    completed = run_script(COUNTS, env=host.env, timeout_s=380)
    assert [json.loads(line) for line in completed.stdout.splitlines()] == [[1, 1, False, 0, []]] * 2


# Tasks written for a whole host -----------------------------------------------------------------------------

HOST_TASK = """
import warnings

GIB = 2**30

def limits(device):
    import torch
    from torch.cuda.memory import get_per_process_memory_fraction, set_per_process_memory_fraction
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        set_per_process_memory_fraction(1.0, device)  # CUDA has not started
        granted = get_per_process_memory_fraction()
        torch.cuda.set_per_process_memory_fraction(1.0)
        again = get_per_process_memory_fraction()
        torch.cuda.set_per_process_memory_fraction(granted / 2, device)
        smaller = get_per_process_memory_fraction() / granted
        torch.cuda.set_per_process_memory_fraction(granted)
    refused = []
    for wrong in (1, 1.5, -0.5):
        try:
            torch.cuda.set_per_process_memory_fraction(wrong)
        except (TypeError, ValueError) as error:
            refused.append(type(error).__name__)
    try:
        torch.zeros(4 * GIB, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError:
        is_held = True
    else:
        is_held = False
    return {
        "granted_gib": granted * torch.cuda.get_device_properties(0).total_memory / GIB,
        "is_kept": again == granted, "smaller": smaller, "is_held": is_held, "refused": refused,
        "warnings": [(str(w.message), w.category.__name__, w.filename) for w in caught],
    }

def second_card():
    import torch
    torch.zeros(1, device="cuda:1")
"""
ON_TWO_GPUS = (
    CALLS
    + """
options = {"gpu": "require", "gpu_memory": "3GiB"}
for device in (None, 0, "cuda:0"):
    print(json.dumps(run_in_worker("task_of_a_host:limits", device, **options)))
for more in ({}, {"num_gpus": 2, "gpu_memory": None}):
    try:
        run_in_worker("task_of_a_host:second_card", **{**options, **more})
    except Exception as error:
        print(json.dumps(str(error)))
    else:
        print(json.dumps("it has run"))
"""
)


def test_a_task_cannot_raise_its_limit_or_use_the_number_of_another_gpu(
    cuda_host: MakeHost, run_script: RunScript, write_script: WriteScript
) -> None:
    host = cuda_host(gpus=2)
    script = write_script(HOST_TASK, "task_of_a_host.py")
    completed = run_script(ON_TWO_GPUS, env=host.env, timeout_s=380)
    *limits, second, with_two_gpus = [json.loads(line) for line in completed.stdout.splitlines()]
    assert len(limits) == 3
    for report in limits:
        assert report["granted_gib"] <= 3 and report["is_kept"] and report["is_held"], report
        assert report["smaller"] == pytest.approx(0.5)
        assert report["refused"] == ["TypeError", "ValueError", "ValueError"]
        assert len(report["warnings"]) == 2, "one warning for each attempt to raise the limit"
        for text, category, file in report["warnings"]:
            assert re.fullmatch(
                r"set_per_process_memory_fraction\(1\) has no effect: the lease of this call grants 0\.\d+ "
                r"of the GPU's memory, and that stays the limit\. .*gpu_memory.*",
                text,
            )
            assert (category, file) == ("RuntimeWarning", str(script))
    assert "invalid device ordinal (a worker sees only the GPU of its lease, as cuda:0; write" in second
    assert with_two_gpus == "it has run"
