"""A client process whose app has initialised CUDA, with a real shared library in the driver's place."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launched import events_of
from mod_host import ModHost
from workers.test_choose import driver as driver

pytestmark = pytest.mark.timeout(120)

SCRIPT = """
import ctypes, json, os, sys
driver, visible, uuid, *options = sys.argv[1:]
cuda = ctypes.CDLL(driver)
cuda.be(bytes.fromhex(uuid.partition("-")[2].replace("-", "")))
cuda.cuInit(int(visible))  # as torch.cuda.is_available() at the top of an app's module may
from flwr.app import MetricRecord, RecordDict
from mod_scripts import ask, mod_functions
options = json.loads(options[0])
before = dict(os.environ)
state = RecordDict({"tries": MetricRecord({"count": 0})})
found = [
    ask(gpu_memory="2GiB", **options),
    ask(gpu_memory="3GiB", config={"use-gpu": False}, **options),
    ask(gpu_memory="4GiB", function=mod_functions.runs_out_of_memory_once, state=state, **options),
]
changed = {name: value for name, value in os.environ.items() if before.get(name) != value}
print(json.dumps({"pid": os.getpid(), "found": found, "left": changed, "tries": state["tries"]["count"]}))
"""


@pytest.fixture
def host(tmp_path: Path) -> ModHost:
    return ModHost(tmp_path / "host")


@pytest.fixture
def client(host: ModHost, driver: str, run_script: Callable[..., Any]) -> Callable[..., Any]:
    """Run a client process that has initialised CUDA and sees so many GPUs, the host's second one first."""

    def run(visible: int, name: str = "flwr-clientapp", env: Any = None, **options: Any) -> Any:
        given = json.dumps({"start_method": "auto", **options})
        env = {**host.env, "PYTHONDONTWRITEBYTECODE": "1", **(env or {})}
        done = run_script(SCRIPT, driver, str(visible), host.uuids[1], given, env=env, name=name)
        return json.loads(done.stdout)

    return run


@pytest.mark.parametrize("visible", [1, 2])
def test_each_call_is_a_fresh_interpreter(visible: int, client: Callable[..., Any], host: ModHost) -> None:
    said = client(visible)
    two, cpu, again = said["found"]
    assert len({said["pid"], *(one["pid"] for one in said["found"])}) == 4
    assert (two["mib"], cpu["mib"]) == ([2048], [])
    assert two["visible"] in host.uuids and cpu["visible"] == ""
    assert again["mib"][0] > 6000 and said["tries"] == 1
    assert said["left"] == {}
    assert {one["start_method"] for one in events_of(host.run_dir, "worker_started")} == {"spawn"}


def test_a_script_that_has_initialised_cuda_has_the_fork_server(
    client: Callable[..., Any], host: ModHost
) -> None:
    said = client(1, name="client.py")
    assert [one["mib"] for one in said["found"][:2]] == [[2048], []]
    assert said["tries"] == 1 and said["left"] == {}
    assert {one["start_method"] for one in events_of(host.run_dir, "worker_started")} == {"forkserver"}


def test_a_fork_is_refused_with_what_to_do(client: Callable[..., Any], host: ModHost) -> None:
    said = client(1, start_method="fork")
    assert [kind for kind, _ in said["found"]] == ["ConfigError"] * 3
    text = said["found"][0][1]
    assert text.startswith("train of client 3: start_method='fork' cannot be used: this process has init")
    assert "'auto' or 'spawn'" in text
    assert events_of(host.run_dir, "worker_started", "lease_granted") == []
