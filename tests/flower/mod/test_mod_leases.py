"""What a client gets of the host's GPUs, by whom: node config, ``resources``, options, environment."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launched import StubHost, events_of

from flower_gpu.leases.admission import SHARED_PART
from flower_gpu.leases.footprint import Footprints
from flower_gpu.leases.footprint_rule import BESIDE_GPU, ON_CPU, needed_bytes

Run = Callable[..., Any]


class ModHost(StubHost):
    """A host with GPUs, a ledger, footprints and a trace of its own, for programs with clients."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, gpus=2)
        self.run_dir, state = folder / "run", folder / "state"
        self.footprints = state / f"flower-gpu-{os.getuid()}" / "footprints.json"
        for made in (self.run_dir, state):
            made.mkdir(mode=0o700)
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
    """Run a script that prints JSON, on the host."""

    def run(text: str, *arguments: str, **env: str) -> Any:
        start = "import json, os, sys\nfrom mod_scripts import ask, mod_functions\n"
        done = run_script(start + text, *arguments, env={**host.env, **env})
        return json.loads(done.stdout)

    return run


def test_who_asks_and_who_has_the_last_word(run: Run) -> None:
    """The environment, options, what the client has of its own, its node: each goes before the one before."""
    found = run(
        """
own = {3: {"gpu_memory": "4GiB"}}
result = {
    "environment": ask(),
    "options": ask(gpu_memory="3GiB"),
    "options with a share": ask(num_gpus=0.5),
    "table": ask(gpu_memory="3GiB", resources=own),
    "table, in place of a share": ask(num_gpus=0.5, resources=own),
    "function": ask(num_gpus=0.5, resources=lambda context: own[context.node_config["partition-id"]]),
    "function that says nothing": ask(gpu_memory="3GiB", resources=lambda context: None),
    "function that says auto": ask(gpu_memory="3GiB", resources=lambda context: {"num_gpus": None}),
    "table without it": ask(gpu_memory="3GiB", resources={7: {"num_gpus": 1}}),
    "node": ask({"gpu-memory": "5GiB"}, gpu_memory="3GiB", resources=own),
    "node with a share": ask({"num-gpus": 0.25}, gpu_memory="3GiB", resources=own),
    "node with several": ask({"num-gpus": 2}, resources=own),
}
print(json.dumps(result))
""",
        FLOWER_GPU_MEMORY="2GiB",
    )
    whole = int((16 * 1024 - 256) * SHARED_PART)
    assert {name: one["mib"] for name, one in found.items()} == {
        "environment": [2048],
        "options": [3072],
        "options with a share": [int(whole / 2)],
        "table": [4096],
        "table, in place of a share": [4096],
        "function": [4096],
        "function that says nothing": [3072],
        "function that says auto": [2048],  # no more than what the environment asks for
        "table without it": [3072],
        "node": [5120],
        "node with a share": [whole // 4],
        "node with several": [whole, whole],
    }


def test_which_gpus_is_the_nodes_to_say(run: Run) -> None:
    found = run(
        """
one = {"gpu_memory": "2GiB"}
result = {
    "number": ask({"gpu-ids": 1}, gpu_ids=0, **one),
    "own number": ask(resources={3: {"gpu_ids": 1}}, **one),
    "environment before code": ask(gpu="require", env={"FLOWER_GPU_POLICY": "never"}, **one),
    "never": ask({"gpu": "never"}, gpu="force", **one),
    "offered, not wanted": ask({}, config={"use-gpu": False}, **one),
    "not wanted by the run": ask({}, run_config={"use-gpu": False}, **one),
    "the call goes before the run": ask({}, run_config={"use-gpu": False}, config={"use-gpu": True}, **one),
    "forced": ask({"gpu": "force"}, config={"use-gpu": False}, **one),
    "wrong": ask({}, config={"use-gpu": "yes"}, **one),
}
print(json.dumps(result))
"""
    )
    wrong = found.pop("wrong")
    assert {name: one["gpus"] for name, one in found.items() if one["gpus"] == [1]} == {
        "number": [1], "own number": [1]
    }  # fmt: skip
    on_gpu = {name for name, one in found.items() if one["gpus"]}
    assert on_gpu == {"number", "own number", "the call goes before the run", "forced"}
    assert {one["visible"] for name, one in found.items() if name not in on_gpu} == {""}
    assert wrong[0] == "ConfigError"
    assert wrong[1].startswith("train of client 3: use-gpu in the config of the call or the run must be true")


def test_footprints_are_known_by_the_users_function_and_by_sizes(run: Run, host: ModHost) -> None:
    found = run(
        """
from flwr.app import Message
from flwr.clientapp import ClientApp
from mod_messages import context, message

two = {"batch-size": 32, "lr": 0.5, "use-mib": 1500}
result = [
    ask(config=two),
    ask(config=two),
    ask(config={**two, "lr": 0.25}),
    ask(config={**two, "batch-size": 64}),
    ask(config=two, kind="evaluate"),
    ask(config=two, run_config={"image-size": 224}),
]
print(json.dumps(result))
"""
    )
    assert [one["alone"] for one in found] == [True, False, False, True, True, True]
    need = needed_bytes(1500 << 20) >> 20
    assert [one["mib"] for one in found[1:3]] == [[need], [need]]
    keys = [key for key in Footprints(host.footprints).entries() if key.gpu not in (ON_CPU, BESIDE_GPU)]
    assert {(key.task, key.sizes) for key in keys} == {
        ("mod_functions:leased train", (("batch-size", 32),)),
        ("mod_functions:leased train", (("batch-size", 64),)),
        ("mod_functions:leased evaluate", (("batch-size", 32),)),
        ("mod_functions:leased train", (("batch-size", 32), ("image-size", 224))),
    }
    assert {key.weights.partition(" f32")[0] for key in keys} == {"7 parameters"}


def test_functions_of_one_name_are_told_apart_by_what_is_around_them(run: Run, host: ModHost) -> None:
    """Mods between, a ``client_fn``, a function of the script: the user's own name is what counts."""
    run(
        """
import functools
from flwr.clientapp import ClientApp
from flwr.common import FitIns, ndarrays_to_parameters
from flwr.compat.common.recorddict_compat import fitins_to_recorddict
from flwr.app import Message
from flower_gpu import gpu_mod
from mod_messages import answer, context, message

def passing(message, context, call_next):
    return call_next(message, context)

def train(message, context):
    mod_functions.use_gpus(1000)
    return answer(message)

class Callable:
    __call__ = staticmethod(train)

mods = [passing, gpu_mod(start_method="fork"), passing]
for function in (train, Callable(), functools.partial(train)):
    app = ClientApp(mods=mods)
    app.train(mods=[passing])(function)
    app(message(), context())
ins = fitins_to_recorddict(FitIns(ndarrays_to_parameters([]), {}), True)
for client_fn in (mod_functions.client_fn, mod_functions.client_fn_of_old):
    ClientApp(client_fn, mods=mods)(Message(ins, dst_node_id=13, message_type="train"), context())
print(json.dumps(None))
"""
    )
    tasks = [event["task"] for event in events_of(host.run_dir, "lease_granted")]
    assert tasks == ["train"] * 5
    known = {key.task for key in Footprints(host.footprints).entries() if key.gpu not in (ON_CPU, BESIDE_GPU)}
    of_script = {name.rpartition("/")[2] for name in known if name.startswith("/")}
    assert of_script == {"script.py:train train", "script.py:Callable train"}
    assert known - {name for name in known if name.startswith("/")} == {
        "mod_functions:client_fn train",
        "mod_functions:client_fn_of_old train",
    }


def test_out_of_memory_is_tried_again_with_the_state_as_it_was(run: Run, host: ModHost) -> None:
    found = run(
        """
from flwr.app import RecordDict
state = RecordDict()
reply = ask(function=mod_functions.runs_out_of_memory_once, gpu_memory="4GiB", state=state)
print(json.dumps([reply, state["tries"]["count"]]))
"""
    )
    reply, tries = found
    assert tries == 1, "the first try has counted in a worker whose state was not taken over"
    assert reply["mib"][0] > 6000
    assert [one["outcome"] for one in events_of(host.run_dir, "worker_finished")] == ["out of memory", "ok"]


def test_a_mod_or_a_client_with_workers_of_its_own_within_a_worker_shares_its_lease(
    run: Run, host: ModHost
) -> None:
    """With all of the GPU taken, one that waited for a lease of its own would wait for ever.

    Without an option that takes another process, the calls of such a client run in the worker that is there.
    """
    found, with_workers, without = run(
        """
from flwr.app import Message
from flwr.clientapp import ClientApp
from flwr.common import FitIns, ndarrays_to_parameters
from flwr.compat.common import recorddict_compat as compat
from flower_gpu import gpu_mod
from mod_messages import context, message, told

hidden = gpu_mod(num_gpus=2, lease_timeout_s=5)
mod = gpu_mod(num_gpus=2, start_method="fork")
app = ClientApp(mods=[mod, lambda m, c, call: hidden(m, c, call)])
app.train()(mod_functions.leased)
found = [told(app(message(), context()))]
content = compat.fitins_to_recorddict(FitIns(ndarrays_to_parameters([]), {}), True)
for client_fn in (mod_functions.client_fn_with_workers, mod_functions.client_fn_without_options):
    sent = Message(content, dst_node_id=13, message_type="train")
    reply = ClientApp(client_fn, mods=[mod])(sent, context())
    found.append(dict(compat.recorddict_to_fitres(reply.content, True).metrics))
print(json.dumps(found))
"""
    )
    granted = [event["lease"] for event in events_of(host.run_dir, "lease_granted")]
    workers = [event["pid"] for event in events_of(host.run_dir, "worker_started")]
    assert found["gpus"] == [0, 1]
    assert [json.loads(one["lease"])["id"] for one in (with_workers, without)] == granted[1:]
    assert [found["pid"], with_workers["parent"], with_workers["pid"], without["pid"]] == workers
