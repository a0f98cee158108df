"""The start method that ``auto`` chooses, with a real shared library in place of NVIDIA's driver."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from flower_gpu.options import START_METHODS
from flower_gpu.workers import methods as start

# Like the driver, cuDeviceGetCount fails with CUDA_ERROR_NOT_INITIALIZED (3) before cuInit. A device reports
# no UUID (CUDA_ERROR_NOT_SUPPORTED, 801) until ``be`` has set it.
DRIVER = """
#include <string.h>
static int initialised, devices, is_known;
static unsigned char own[16];
void be(const unsigned char *uuid) { memcpy(own, uuid, 16); is_known = 1; }
int cuDeviceGet(int *device, int number) { *device = number; return 0; }
int cuDeviceGetUuid_v2(unsigned char *uuid, int device) {
    memcpy(uuid, own, 16);
    return is_known ? 0 : 801;
}
int cuInit(unsigned int count) { initialised = 1; devices = (int)count; return 0; }
int cuDeviceGetCount(int *count) { if (!initialised) return 3; *count = devices; return 0; }
"""

# Each case runs in a fork, because a process cannot undo the initialisation of CUDA.
SCRIPT = """
    import ctypes, json, os, sys
    from flower_gpu.errors import ConfigError
    from flower_gpu.frameworks.cuda_answers import initialized_cuda_devices
    from flower_gpu.workers import methods

    for driver, program, method, gpus in json.loads(sys.argv[1]):
        if os.fork():
            assert os.wait()[1] == 0
            continue
        sys.argv = [program]
        if driver:
            cuda = ctypes.CDLL(driver)
            if gpus is not None:
                cuda.cuInit(gpus)
        assert initialized_cuda_devices() == gpus
        try:
            print(methods.choose(method).name, flush=True)
        except ConfigError as error:
            print(error, flush=True)
        os._exit(0)
"""

CLIENT_APP = "/some/where/bin/flwr-clientapp"
SCRIPT_OF_USER = "client.py"
NO_LIBRARY, UNTOUCHED = "no library", "untouched"
REFUSED = (
    "start_method='fork' cannot be used: this process has initialised CUDA, so a fork of it could not use a "
    "GPU. Use 'auto' or 'spawn'"
)


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> str:
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs gcc")
    folder = tmp_path_factory.mktemp("driver")
    (folder / "cuda.c").write_text(DRIVER)
    library = folder / "libcuda.so.1"
    options = ["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"]
    subprocess.run([compiler, *options, "-o", library, folder / "cuda.c"], check=True, timeout=60)
    return str(library)


CHOICES = [
    (CLIENT_APP, NO_LIBRARY, "auto", "fork"),
    (CLIENT_APP, UNTOUCHED, "auto", "fork"),
    (CLIENT_APP, 1, "auto", "spawn"),
    (CLIENT_APP, 2, "auto", "spawn"),
    (CLIENT_APP, 0, "auto", "spawn"),
    (SCRIPT_OF_USER, NO_LIBRARY, "auto", "forkserver"),
    (SCRIPT_OF_USER, UNTOUCHED, "auto", "forkserver"),
    (SCRIPT_OF_USER, 1, "auto", "forkserver"),
    (SCRIPT_OF_USER, 2, "auto", "forkserver"),
    ("", UNTOUCHED, "auto", "forkserver"),
    (SCRIPT_OF_USER, UNTOUCHED, "fork", "fork"),
    (SCRIPT_OF_USER, 1, "spawn", "spawn"),
    (CLIENT_APP, UNTOUCHED, "forkserver", "forkserver"),
    (CLIENT_APP, 1, "spawn", "spawn"),
    (CLIENT_APP, UNTOUCHED, "in-process", "in-process"),
    (CLIENT_APP, 1, "fork", REFUSED),
    (SCRIPT_OF_USER, 1, "fork", REFUSED),
]


def test_the_choice_depends_on_the_program_and_the_state_of_cuda(
    driver: str, run_script: Callable[..., Any]
) -> None:
    cases = [
        ("" if cuda == NO_LIBRARY else driver, program, method, cuda if isinstance(cuda, int) else None)
        for program, cuda, method, _ in CHOICES
    ]
    choices = run_script(SCRIPT, json.dumps(cases)).stdout.splitlines()
    assert [*zip(CHOICES, choices, strict=True)] == [(case, case[3]) for case in CHOICES]


def test_a_program_named_flwr_clientapp_forks(run_script: Callable[..., Any]) -> None:
    """A script with that file name forks its worker, so a lock can be passed without being pickled."""
    done = run_script(
        """
        import threading
        from flower_gpu import run_in_worker
        print(run_in_worker(lambda lock: lock.locked(), threading.Lock()))
        """,
        name="flwr-clientapp",
    )
    assert done.stdout == "False\n"


def test_every_name_that_settings_accept_is_a_start_method() -> None:
    assert start.METHODS.keys() == set(START_METHODS) - {"auto"}
