"""TensorFlow and JAX in real workers with a lease: their memory settings, and computing in forks."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from phases import without_phases

from flower_gpu.calls import grants
from flower_gpu.errors import WorkerStartError, WorkerTaskError
from flower_gpu.frameworks import jax
from flower_gpu.leases.lease import Lease, Share
from flower_gpu.workers import caller as worker
from flower_gpu.workers.call import Call
from flower_gpu.workers.forkserver import client, control

sys.path.insert(0, str(Path(__file__).parent))  # workers inherit the sys.path of the caller

GIB = 2**30
METHODS = ["spawn", "forkserver"]
CAP_MIB = 4096

# This module imports neither, because other tests fork this process, which is impossible after computing with
# them.
pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(not (find_spec("tensorflow") and find_spec("jax")), reason="needs TensorFlow and JAX"),
]


@pytest.fixture(autouse=True, scope="module")
def separate_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Give these tests separate fork servers, with less output of TensorFlow.

    A fork server imports libraries with the environment of the process that started it. These tests could not
    use a server that read other variables because a test of another file started it.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TF_CPP_MIN_LOG_LEVEL", "2")
        patch.setenv("FLOWER_GPU_STATE_DIR", str(tmp_path_factory.mktemp("state")))
        patch.setattr(client, "_memory", client._Memory())
        yield
        client._memory.stays.close()
        control.stop(wait_s=60)


@pytest.fixture(scope="module")
def learned(separate_servers: None) -> None:
    """Let the fork server import both libraries, as it does after a worker had to import them."""
    client.learn(["tensorflow", "jax"], patience_s=240)  # a busy machine imports them slowly


def call(
    task: str, method: str, *args: Any, gpus: int = 1, preload: str = "", **env: str
) -> tuple[Any, list[dict[str, Any]]]:
    """Run a task in a worker that is set up for its lease. Returns the result and the events."""
    shares = (Share(f"GPU-{i}", i, "A", 16 * GIB, 5 * GIB, CAP_MIB * 2**20 + 7) for i in range(gpus))
    lease = Lease("ab12", tuple(shares))
    env |= grants.of_lease(lease, {**os.environ, **env})
    functions = ((f"framework_tasks:{preload}", {}),) if preload else ()
    prepared = Call(f"framework_tasks:{task}", args, {}, env=env, setup=grants.SETUP, preload=functions)
    events: list[dict[str, Any]] = []
    value = worker.run(prepared, method, timeout_s=120, on_event=without_phases(events))
    return value, events


@pytest.mark.parametrize("method", METHODS)
def test_tensorflow_starts_with_the_cap(method: str, learned: None) -> None:
    report, _ = call("limits_mib", method)
    assert report["limits"] == [[CAP_MIB]]
    assert report["growth"] == "true"
    assert ("tensorflow" in report["imported_before"]) is (method == "forkserver")
    assert not report["looked_before"], "a task that does not need TensorFlow must not look for its GPUs"
    assert not report["started"]
    assert report["loader_is_its_own"]


GROWTH = "[tf.config.experimental.set_memory_growth(gpu, True) for gpu in gpus]"
LOGICAL = (
    "tf.config.set_logical_device_configuration(gpus[0], [tf.config.LogicalDeviceConfiguration({})] * 2)"
)


@pytest.mark.parametrize(
    ("program", "gpus", "expected"),
    [
        (GROWTH, 2, [[CAP_MIB], [CAP_MIB]]),
        (LOGICAL.format("memory_limit=800"), 1, [[800, 800]]),
        (LOGICAL.format("memory_limit=8000"), 1, [[CAP_MIB / 2] * 2]),
        ("tf.config.set_visible_devices(gpus[1:], 'GPU')", 2, [[CAP_MIB]]),
    ],
    ids=["growth", "smaller", "larger", "one-of-two"],
)
def test_memory_settings_of_scripts_work_within_the_cap(
    program: str, gpus: int, expected: list[list[float]], learned: None
) -> None:
    assert call("limits_mib", "forkserver", program, gpus, gpus=gpus)[0]["limits"] == expected


def test_jax_starts_with_the_cap_also_if_the_fork_server_imported_it(learned: None) -> None:
    for method in METHODS:
        report, _ = call("jax_sum", method)
        assert report["sum"] == 45
        assert 0.2499 * 16 * GIB < report["fraction"] * 16 * GIB <= CAP_MIB * 2**20 + 7
        assert report["preallocate"] is False
        assert ("jax" in report["imported_before"]) is (method == "forkserver")


@pytest.mark.parametrize("name", jax.FRACTIONS)
def test_a_memory_fraction_set_by_a_module_is_ignored(name: str, learned: None) -> None:
    report, _ = call("jax_sum_with_fraction", "forkserver", name)
    assert report["fraction"] < 0.26
    assert report["preallocate"] is False


def test_forks_can_compute_after_their_server_imported_both(learned: None) -> None:
    """They use data sets with threads, compiled functions, and arrays of a preload function."""
    first, _ = call("sums_of_preloaded", "forkserver", preload="load_numpy")
    again, _ = call("sums_of_preloaded", "forkserver", preload="load_numpy")
    for sums in (first, again):
        assert (sums["tensorflow"], sums["jax"], sums["data"]) == (90, 45, 45)
        assert sums["imported_before"] == ["jax", "keras", "tensorflow"]
    assert first["pid"] != again["pid"]


@pytest.mark.parametrize(
    ("function", "library"),
    [
        ("make_tensor", "TensorFlow"),
        ("make_dataset", "TensorFlow"),
        ("make_model", "TensorFlow"),
        ("make_jax_array", "JAX"),
    ],
)
def test_preload_functions_that_compute_are_refused(function: str, library: str, learned: None) -> None:
    with pytest.raises(WorkerStartError, match=f"{function} computes with {library}.*Load numpy arrays"):
        call("threads", "forkserver", preload=function)


def test_pytorch_trains_in_forks_after_their_server_imported_tensorflow(learned: None) -> None:
    """PyTorch aborts in a process that imported TensorFlow first."""
    report, _ = call("torch_step", "forkserver")
    assert report == {"imported_before": ["jax", "keras", "tensorflow"], "changed": True}


def test_workers_draw_different_random_numbers(learned: None) -> None:
    drawn = [call("random_numbers", "forkserver")[0] for _ in range(2)]
    for first, second in zip(*drawn, strict=True):
        assert first != second


def test_running_out_of_memory_is_reported_as_an_event(learned: None) -> None:
    events: list[dict[str, Any]] = []
    env = grants.of_lease(Lease("x", (Share("GPU-0", 0, "A", 16 * GIB, 5 * GIB, 4 * GIB),)), os.environ)
    prepared = Call("framework_tasks:tensorflow_out_of_memory", env=env, setup=grants.SETUP)
    with pytest.raises(WorkerTaskError, match="ResourceExhaustedError: OOM when allocating"):
        worker.run(prepared, "forkserver", timeout_s=120, on_event=without_phases(events))
    (out_of_memory,) = (event for event in events if event["event"] == "out_of_memory")
    assert out_of_memory["uuid"] == "GPU-0"


CHOOSE = """
import sys
from flower_gpu.errors import ConfigError
from flower_gpu.workers import methods
sys.argv[0] = "/some/where/flwr-clientapp"
{program}
print(methods.choose("auto"))
try:
    print(methods.choose("fork"))
except ConfigError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("program", "auto", "fork"),
    [
        ("import tensorflow, jax", "fork", "fork"),
        ("import tensorflow; tensorflow.constant(1)", "spawn", "this process has computed with TensorFlow"),
        ("import jax; jax.devices()", "spawn", "this process has computed with JAX"),
    ],
)
def test_a_process_that_has_computed_is_not_forked(
    program: str, auto: str, fork: str, run_script: Any
) -> None:
    lines = run_script(
        CHOOSE.format(program=program), env={"CUDA_VISIBLE_DEVICES": ""}, timeout_s=200
    ).stdout.splitlines()
    assert lines[0] == auto
    assert fork in lines[1]


def test_variables_that_tensorflow_reads_at_import_come_from_the_caller(learned: None) -> None:
    """C++ code reads them without Python, so a server that has imported TensorFlow cannot serve other values.

    This must be the last test of the file, because afterwards this process asks for other servers.
    """
    assert "tensorflow" in call("limits_mib", "forkserver")[0]["imported_before"]
    assert call("limits_mib", "forkserver", TF_ENABLE_ONEDNN_OPTS="0")[0]["imported_before"] == []
