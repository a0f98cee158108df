"""Which share of the GPUs a client gets from node config, ``resources``, options and environment."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launched import events_of
from nvml_stub import Host

from flower_gpu.leases.admission import SHARED_PART
from flower_gpu.leases.footprint import Footprints
from flower_gpu.leases.footprint_rule import BESIDE_GPU, ON_CPU, needed_bytes

Run = Callable[..., Any]


class ModHost(Host):
    """A host with stub GPUs for programs with clients. It has its own ledger, footprints and trace."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, gpus=2)
        self.run_dir, state = folder / "run", folder / "state"
        self.footprints = state / f"flower-gpu-{os.getuid()}" / "footprints.json"
        for path in (self.run_dir, state):
            path.mkdir(mode=0o700)
        tests = Path(__file__).parents[2]
        self.env |= {
            "FLOWER_GPU_STATE_DIR": str(state),
            "FLOWER_GPU_RUN_DIR": str(self.run_dir),
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), str(tests)]),
        }


@pytest.fixture
def host(tmp_path: Path) -> ModHost:
    return ModHost(tmp_path / "host")


@pytest.fixture
def run(host: ModHost, run_script: Callable[..., Any]) -> Run:
    """Return a function that runs a script on the host and returns the JSON that it prints."""

    def run(text: str, *arguments: str, **env: str) -> Any:
        start = "import json, os, sys\nfrom mod_scripts import ask, mod_functions\n"
        completed = run_script(start + text, *arguments, env={**host.env, **env})
        return json.loads(completed.stdout)

    return run


def test_each_source_of_options_overrides_the_previous_one(run: Run) -> None:
    """The order is: environment, options, ``resources`` of the client, and config of its node."""
    reports = run(
        """
table = {3: {"gpu_memory": "4GiB"}}
result = {
    "environment": ask(),
    "options": ask(gpu_memory="3GiB"),
    "options with a share": ask(num_gpus=0.5),
    "table": ask(gpu_memory="3GiB", resources=table),
    "table, in place of a share": ask(num_gpus=0.5, resources=table),
    "function": ask(num_gpus=0.5, resources=lambda context: table[context.node_config["partition-id"]]),
    "function that says nothing": ask(gpu_memory="3GiB", resources=lambda context: None),
    "function that says auto": ask(gpu_memory="3GiB", resources=lambda context: {"num_gpus": None}),
    "table without the client": ask(gpu_memory="3GiB", resources={7: {"num_gpus": 1}}),
    "node": ask({"gpu-memory": "5GiB"}, gpu_memory="3GiB", resources=table),
    "node with a share": ask({"num-gpus": 0.25}, gpu_memory="3GiB", resources=table),
    "node with several": ask({"num-gpus": 2}, resources=table),
}
print(json.dumps(result))
""",
        FLOWER_GPU_MEMORY="2GiB",
    )
    full_mib = int((16 * 1024 - 256) * SHARED_PART)
    assert {name: report["mib"] for name, report in reports.items()} == {
        "environment": [2048],
        "options": [3072],
        "options with a share": [int(full_mib / 2)],
        "table": [4096],
        "table, in place of a share": [4096],
        "function": [4096],
        "function that says nothing": [3072],
        "function that says auto": [2048],  # the value of the environment
        "table without the client": [3072],
        "node": [5120],
        "node with a share": [full_mib // 4],
        "node with several": [full_mib, full_mib],
    }


def test_node_config_and_environment_decide_which_gpus_are_used(run: Run) -> None:
    reports = run(
        """
memory = {"gpu_memory": "2GiB"}
result = {
    "id from node config": ask({"gpu-ids": 1}, gpu_ids=0, **memory),
    "id from resources": ask(resources={3: {"gpu_ids": 1}}, **memory),
    "environment overrides code": ask(gpu="require", env={"FLOWER_GPU_POLICY": "never"}, **memory),
    "never": ask({"gpu": "never"}, gpu="force", **memory),
    "declined by the call": ask({}, config={"use-gpu": False}, **memory),
    "declined by the run": ask({}, run_config={"use-gpu": False}, **memory),
    "call overrides run": ask({}, run_config={"use-gpu": False}, config={"use-gpu": True}, **memory),
    "forced": ask({"gpu": "force"}, config={"use-gpu": False}, **memory),
    "invalid": ask({}, config={"use-gpu": "yes"}, **memory),
}
print(json.dumps(result))
"""
    )
    error, text = reports.pop("invalid")
    assert {name: report["gpus"] for name, report in reports.items() if report["gpus"] == [1]} == {
        "id from node config": [1], "id from resources": [1]
    }  # fmt: skip
    on_gpu = {name for name, report in reports.items() if report["gpus"]}
    assert on_gpu == {"id from node config", "id from resources", "call overrides run", "forced"}
    assert {report["visible"] for name, report in reports.items() if name not in on_gpu} == {""}
    assert error == "ConfigError"
    assert text.startswith("train of client 3: use-gpu in the config of the call or the run must be true")


def test_footprints_are_kept_per_function_of_the_user_and_per_size(run: Run, host: ModHost) -> None:
    reports = run(
        """
from flwr.app import Message
from flwr.clientapp import ClientApp
from mod_messages import context, message

config = {"batch-size": 32, "lr": 0.5, "use-mib": 1500}
result = [
    ask(config=config),
    ask(config=config),
    ask(config={**config, "lr": 0.25}),
    ask(config={**config, "batch-size": 64}),
    ask(config=config, kind="evaluate"),
    ask(config=config, run_config={"image-size": 224}),
]
print(json.dumps(result))
"""
    )
    assert [report["alone"] for report in reports] == [True, False, False, True, True, True]
    need = needed_bytes(1500 << 20) >> 20
    assert [report["mib"] for report in reports[1:3]] == [[need], [need]]
    keys = [key for key in Footprints(host.footprints).entries() if key.gpu not in (ON_CPU, BESIDE_GPU)]
    assert {(key.task, key.sizes) for key in keys} == {
        ("mod_functions:leased train", (("batch-size", 32),)),
        ("mod_functions:leased train", (("batch-size", 64),)),
        ("mod_functions:leased evaluate", (("batch-size", 32),)),
        ("mod_functions:leased train", (("batch-size", 32), ("image-size", 224))),
    }
    assert {key.weights.partition(" f32")[0] for key in keys} == {"7 parameters"}


def test_footprints_are_kept_under_the_name_of_the_users_own_function(run: Run, host: ModHost) -> None:
    """Mods, wrappers and a ``client_fn`` around the function do not matter."""
    run(
        """
import functools
from flwr.clientapp import ClientApp
from flwr.common import FitIns, ndarrays_to_parameters
from flwr.compat.common.recorddict_compat import fitins_to_recorddict
from flwr.app import Message
from flower_gpu import gpu_mod
from mod_messages import context, make_reply, message

def passing(message, context, call_next):
    return call_next(message, context)

def train(message, context):
    mod_functions.use_gpus(1000)
    return make_reply(message)

class Callable:
    __call__ = staticmethod(train)

mods = [passing, gpu_mod(start_method="fork"), passing]
for function in (train, Callable(), functools.partial(train)):
    app = ClientApp(mods=mods)
    app.train(mods=[passing])(function)
    app(message(), context())
ins = fitins_to_recorddict(FitIns(ndarrays_to_parameters([]), {}), True)
for client_fn in (mod_functions.client_fn, mod_functions.client_fn_with_cid):
    ClientApp(client_fn, mods=mods)(Message(ins, dst_node_id=13, message_type="train"), context())
print(json.dumps(None))
"""
    )
    tasks = [event["task"] for event in events_of(host.run_dir, "lease_granted")]
    assert tasks == ["train"] * 5
    known = {key.task for key in Footprints(host.footprints).entries() if key.gpu not in (ON_CPU, BESIDE_GPU)}
    script_tasks = {name.rpartition("/")[2] for name in known if name.startswith("/")}
    assert script_tasks == {"script.py:train train", "script.py:Callable train"}
    assert known - {name for name in known if name.startswith("/")} == {
        "mod_functions:client_fn train",
        "mod_functions:client_fn_with_cid train",
    }


def test_a_call_that_ran_out_of_memory_is_retried_with_the_original_state(run: Run, host: ModHost) -> None:
    reply, tries = run(
        """
from flwr.app import RecordDict
state = RecordDict()
reply = ask(function=mod_functions.runs_out_of_memory_once, gpu_memory="4GiB", state=state)
print(json.dumps([reply, state["tries"]["count"]]))
"""
    )
    assert tries == 1, "the state of the failed worker was kept"
    assert reply["mib"][0] > 6000
    assert [event["outcome"] for event in events_of(host.run_dir, "worker_finished")] == [
        "out of memory",
        "ok",
    ]


def test_a_mod_or_a_client_inside_a_worker_shares_the_lease_of_that_worker(run: Run, host: ModHost) -> None:
    """The outer lease holds all GPUs, so waiting for a second lease would never end.

    Unless an option demands another process, the calls of such a client run in the existing worker.
    """
    nested_mod, with_workers, without = run(
        """
from flwr.app import Message
from flwr.clientapp import ClientApp
from flwr.common import FitIns, ndarrays_to_parameters
from flwr.compat.common import recorddict_compat as compat
from flower_gpu import gpu_mod
from mod_messages import context, message, reply_values

hidden = gpu_mod(num_gpus=2, lease_timeout_s=5)
mod = gpu_mod(num_gpus=2, start_method="fork")
app = ClientApp(mods=[mod, lambda m, c, call: hidden(m, c, call)])
app.train()(mod_functions.leased)
reports = [reply_values(app(message(), context()))]
content = compat.fitins_to_recorddict(FitIns(ndarrays_to_parameters([]), {}), True)
for client_fn in (mod_functions.client_fn_with_workers, mod_functions.client_fn_without_options):
    sent = Message(content, dst_node_id=13, message_type="train")
    reply = ClientApp(client_fn, mods=[mod])(sent, context())
    reports.append(dict(compat.recorddict_to_fitres(reply.content, True).metrics))
print(json.dumps(reports))
"""
    )
    granted = [event["lease"] for event in events_of(host.run_dir, "lease_granted")]
    workers = [event["pid"] for event in events_of(host.run_dir, "worker_started")]
    assert nested_mod["gpus"] == [0, 1]
    assert [json.loads(report["lease"])["id"] for report in (with_workers, without)] == granted[1:]
    assert [nested_mod["pid"], with_workers["parent"], with_workers["pid"], without["pid"]] == workers
