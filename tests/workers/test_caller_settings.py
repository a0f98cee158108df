"""Settings and functions of a script, as its workers and their processes see them."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import run_programs
from forkservers import WITH_TASKS

pytestmark = pytest.mark.timeout(300)

#: A script that changes settings below its main guard, and reads them in a worker of each kind.
SETS = """
import decimal, json, locale, logging, multiprocessing, socket, sys, threading
import numpy, torch
from flower_gpu import run_in_worker

def look():
    import decimal, locale, logging, multiprocessing, socket, sys, threading
    import numpy, torch
    logging.getLogger("of.script").debug("a line of the worker")
    return {
        "start method": multiprocessing.get_start_method(),
        "recursion": sys.getrecursionlimit(),
        "switch": sys.getswitchinterval(),
        "stack": threading.stack_size(),
        "timeout": socket.getdefaulttimeout(),
        "precision": decimal.getcontext().prec,
        "locale": locale.setlocale(locale.LC_ALL),
        "numpy": numpy.geterr()["over"],
        "level": logging.getLogger("of.script").level,
        "dtype": str(torch.zeros(1).dtype),
        "device": str(torch.zeros(1).device),
        "sharing": torch.multiprocessing.get_sharing_strategy(),
        "matmul": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "threads": torch.get_num_threads(),
    }

if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    sys.setrecursionlimit(1234)
    sys.setswitchinterval(0.02)
    threading.stack_size(1 << 22)
    socket.setdefaulttimeout(7.5)
    decimal.getcontext().prec = 11
    locale.setlocale(locale.LC_ALL, "C")
    numpy.seterr(over="raise")
    logging.basicConfig(format="%(name)s says %(message)s", stream=sys.stderr)
    logging.getLogger("of.script").setLevel(logging.DEBUG)
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.multiprocessing.set_sharing_strategy("file_system")
    torch.set_float32_matmul_precision("medium")
    torch.set_deterministic_debug_mode("error")
    torch.set_num_threads(1)  # The default is the number of cores.
    for method in sys.argv[1:]:
        print(json.dumps(run_in_worker(look, start_method=method)), flush=True)
    print(json.dumps(look()))
"""

#: A script that makes calls in PyTorch's contexts and in a thread, as Flower calls clients.
CONTEXTS = """
import json, sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
import numpy, torch
from flower_gpu import GPUClient

def fit(weights, config):
    weight = torch.tensor(weights[0], requires_grad=True)
    error = ""
    try:
        (weight * 2).sum().backward()
    except RuntimeError as caught:
        error = str(caught)
    seen = {
        "gradients": torch.is_grad_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "of product": str((torch.ones(2, 2) @ torch.ones(2, 2)).dtype),
        "error": error,
    }
    return weights, 1, seen

def in_context(context, call):
    with context():
        return call([numpy.ones(1, numpy.float32)], {})[2]

if __name__ == "__main__":
    contexts = {
        "none": nullcontext,
        "no_grad": torch.no_grad,
        "inference_mode": torch.inference_mode,
        "autocast": partial(torch.autocast, "cpu", dtype=torch.bfloat16),
    }
    calls = [fit, *(GPUClient(fit, start_method=method, gpu="never").fit for method in sys.argv[1:])]
    with ThreadPoolExecutor(1) as thread:
        for name, context in contexts.items():
            results = [thread.submit(in_context, context, call).result() for call in calls]
            print(json.dumps([name, results]), flush=True)
"""

#: A script whose worker computes in threads and then starts a process, as examples in articles do.
STARTS = """
import multiprocessing as mp
import sys
import torch
from flower_gpu import run_in_worker

class Data:
    size = 64

def compute(seed, results):
    torch.manual_seed(seed)
    matrix = torch.rand(Data.size * 8, Data.size * 8)
    results[seed] = float((matrix @ matrix).relu().sum()), __name__, mp.get_start_method()

def task():
    (torch.rand(512, 512) @ torch.rand(512, 512)).exp().sum()
    results = mp.Manager().dict()
    process = mp.Process(target=compute, args=(3, results))
    process.start()
    process.join()
    return process.exitcode, dict(results)

if __name__ == "__main__":
    start, *methods = sys.argv[1:]
    if start != "default":
        mp.set_start_method(start)
    for method in methods:
        print(run_in_worker(task, start_method=method, env={"OMP_NUM_THREADS": "2"}), flush=True)
"""


def run(folder: Path, text: str, *words: str) -> run_programs.Ended:
    (folder / "script.py").write_text(text)
    command = [sys.executable, "script.py", *words]
    return run_programs.run(command, cwd=folder, env={**os.environ, **WITH_TASKS}, timeout_s=280)


def test_a_worker_takes_over_the_settings_of_a_script(tmp_path: Path) -> None:
    done = run(tmp_path, SETS, "forkserver", "spawn")
    *in_workers, in_script = done.stdout.splitlines()
    expected: dict[str, Any] = json.loads(in_script)
    assert expected["start method"] == "spawn"
    assert [json.loads(line) for line in in_workers] == [expected] * 2, done.stderr
    # Two workers and the script itself have logged.
    assert done.stderr.count("of.script says a line of the worker") == 3


def test_a_call_in_a_context_of_pytorch_computes_as_without_a_worker(tmp_path: Path) -> None:
    """For example, a fit in the context ``no_grad`` also fails in a worker."""
    done = run(tmp_path, CONTEXTS, "forkserver", "spawn", "fork")
    assert done.returncode == 0, done.stderr
    results_by_context = dict(map(json.loads, done.stdout.splitlines()))
    for name, (plain, *in_workers) in results_by_context.items():
        assert in_workers == [plain] * 3, name
    plain = {name: results[0] for name, results in results_by_context.items()}
    assert plain["none"] == {"gradients": True, "autocast": False, "of product": "torch.float32", "error": ""}
    assert plain["autocast"]["of product"] == "torch.bfloat16"
    for name in ("no_grad", "inference_mode"):
        assert not plain[name]["gradients"]
        assert "does not require grad" in plain[name]["error"]


@pytest.mark.parametrize("start", ["spawn", "default", "forkserver"])
def test_a_process_of_a_task_has_the_functions_of_the_script(start: str, tmp_path: Path) -> None:
    """With every start method, the process can use the script's functions, and its threads work."""
    done = run(tmp_path, STARTS, start, "forkserver", *(["spawn"] if start == "spawn" else []))
    outcomes = [eval(line) for line in done.stdout.splitlines()]
    assert [code for code, _ in outcomes] == [0] * len(outcomes) and outcomes, done.stderr
    values = [results[3] for _, results in outcomes]
    assert len(set(values)) == 1
    _, module, used = values[0]
    assert used == start or (start == "default" and used in ("fork", "forkserver"))
    assert module == ("__main__" if used == "fork" else "__mp_main__")


#: A script with settings that a worker cannot take over unchanged.
ODD = """
import logging, sys, threading
import numpy, torch
from flower_gpu import run_in_worker

class Identity(logging.Filter):
    def filter(self, record):
        record.request = "r1"
        return True

def look():
    import logging, numpy, torch
    logging.getLogger("of.script").error("a line of the worker")
    return float(numpy.float64(1) / 0), str(torch.zeros(1).device)

if __name__ == "__main__":
    numpy.seterrcall(print)
    numpy.seterr(divide="call")
    torch.set_default_device("cuda")
    for number, formatter in enumerate((
        logging.Formatter("%(request)s says %(message)s"),
        logging.Formatter("says %(message)s", defaults={"lock": threading.Lock()}),
    )):
        handler = logging.StreamHandler()
        handler.setFormatter(formatter)
        if number == 0:
            handler.addFilter(Identity())
        logging.root.handlers[:] = [handler]
        print(run_in_worker(look, start_method="forkserver", gpu="never"), flush=True)
"""


def test_settings_that_cannot_be_taken_over_do_not_fail_the_call(tmp_path: Path) -> None:
    done = run(tmp_path, ODD)
    assert done.stdout.splitlines() == ["(inf, 'cpu')"] * 2, done.stderr
    assert done.stderr.count("a line of the worker") == 2 and "Logging error" not in done.stderr


def test_a_script_without_a_main_guard_does_not_start_processes_endlessly(tmp_path: Path) -> None:
    """multiprocessing imports the script in the new process, which must not make the same call again."""
    done = run(
        tmp_path,
        """
import multiprocessing
from flower_gpu import run_in_worker

def task():
    process = multiprocessing.get_context("spawn").Process(target=print, args=(task,))
    process.start()
    process.join()
    return process.exitcode

print(run_in_worker(task))
""",
    )
    assert done.stdout == "1\n"
    assert "multiprocessing imports this script" in done.stderr and "__name__" in done.stderr
