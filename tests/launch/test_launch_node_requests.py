"""What nodes ask for in their configs (``num-gpus``, ``gpu-memory``) is held against the host, too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from nvml_stub import Host

# Plans of several command lines: what they remark, or why they are refused.
PLANS = """
import json, os, sys
from flower_gpu import cli
from flower_gpu.errors import ConfigError
from flower_gpu.launch import options
from flower_gpu.launch.plan import Plan, make_plan

each = json.loads(os.environ.get("EACH_NODE", "[]"))
of_all = Plan.node_config_of
# As if the launcher had an option for it: further keys for each node, by its number.
Plan.node_config_of = lambda plan, client: {**of_all(plan, client), **(each[client] if each else {})}

def plan(line):
    arguments = cli.build_parser().parse_args(["launch", sys.argv[1], *line.split()])
    try:
        return [list(make_plan(options.from_arguments(arguments)).remarks), None]
    except ConfigError as error:
        return [None, str(error)]

print(json.dumps([plan(line) for line in sys.argv[2:]]))
"""

PlanOn = Callable[..., list[tuple[list[str] | None, str | None]]]


@pytest.fixture
def plan_on(tiny_app: Path, tmp_path: Path) -> PlanOn:
    """Plan command lines on a host with two stub GPUs of 16 GiB."""
    pyproject = tiny_app / "pyproject.toml"
    pyproject.write_text(pyproject.read_text().replace('text = ""', 'text = ""\nuse-gpu = true'))
    host = Host(tmp_path / "host", gpus=2)

    def plan(*lines: str, **variables: str) -> list[tuple[list[str] | None, str | None]]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith("FLOWER_GPU")}
        kept.pop("CUDA_VISIBLE_DEVICES", None)
        here = {"FLOWER_GPU_STATE_DIR": str(tmp_path / "state"), "FLOWER_GPU_LEDGER_DIR": str(tmp_path)}
        done = subprocess.run(
            [sys.executable, "-c", PLANS, str(tiny_app), *lines],
            env={**kept, **here, **host.env, **variables},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        return [(remarks, refused) for remarks, refused in json.loads(done.stdout)]

    return plan


def rooms(at_a_time: int, *gpus: int) -> str:
    return ", ".join(
        f"GPU {gpu} (NVIDIA Stub 16GB) has room for {at_a_time} at a time" for gpu in gpus or (0, 1)
    )


def test_how_many_fit_is_said_for_clients_and_server(plan_on: PlanOn) -> None:
    """The server has no node config: what an option says holds for it."""
    size, share, beside, dealt_out, several = plan_on(
        "--node-config gpu-memory='4GiB'",
        "--node-config num-gpus=0.25",
        "--num-gpus 0.5 --node-config gpu-memory='4GiB'",
        "--gpu-num 0,1 --node-config gpu-memory='4GiB'",
        "--node-config num-gpus=2",
    )
    of_clients = "leases: client 0 and client 1: 4.0 GiB of one GPU for a call; "
    assert size == ([f"{of_clients}{rooms(3)}"], None)
    assert share == ([f"leases: client 0 and client 1: 0.25 of one GPU for a call; {rooms(4)}"], None)
    assert beside == (
        [f"{of_clients}{rooms(3)}", f"leases: the server: 0.5 of one GPU for a call; {rooms(2)}"],
        None,
    )
    assert dealt_out == (
        [f"leases: client {client}: 4.0 GiB of one GPU for a call; {rooms(3, client)}" for client in (0, 1)],
        None,
    )
    assert several == ([], None)


def test_nodes_are_put_together_by_what_they_ask_for(plan_on: PlanOn) -> None:
    each = [{"gpu-memory": "7GiB"}, {"num-gpus": 0.25}, {"gpu-memory": "7168 MiB"}, {}, {"num-gpus": 1}]
    ((remarks, refused),) = plan_on("--clients 5 --gpu-memory 2GiB", EACH_NODE=json.dumps(each))
    assert refused is None
    assert remarks == [
        f"leases: client 0 and client 2: 7.0 GiB of one GPU for a call; {rooms(2)}",
        f"leases: client 1: 0.25 of one GPU for a call; {rooms(4)}",
        f"leases: client 3 and the server: 2.0 GiB of one GPU for a call; {rooms(7)}",
        f"leases: client 4: 1 GPU for a call; {rooms(1)}",
    ]


def test_one_node_that_can_never_be_served_is_enough_to_refuse(plan_on: PlanOn) -> None:
    each = [{}, {"gpu-memory": "100GiB"}, {"num-gpus": 1}]
    ((_, refused),) = plan_on("--clients 3", EACH_NODE=json.dumps(each))
    assert refused is not None and refused.startswith("client 1: ")
    assert "no GPU can ever give so much" in refused and "ask for at most 16128MiB" in refused
    # Nor what it may not have: the same request, but of a GPU that is another one's.
    each = [{"num-gpus": 2, "gpu-num": "0,1"}, {"num-gpus": 2, "gpu-num": 1}]
    ((_, refused),) = plan_on("--clients 2", EACH_NODE=json.dumps(each))
    assert refused is not None and refused.startswith("client 1: ") and "a call may use 1 here" in refused


@pytest.mark.parametrize(
    ("line", "asked", "words"),
    [
        ("--node-config gpu-memory='100GiB'", "gpu-memory='100GiB'", "no GPU can ever give so much"),
        (
            "--gpu-memory 2GiB --node-config gpu-memory='100GiB'",
            "gpu-memory='100GiB'",
            "no GPU can ever give so much",
        ),
        ("--node-config num-gpus=3", "num-gpus=3", "a call may use 2 here"),
        ("--num-gpus 1 --node-config num-gpus=0.01", "num-gpus=0.01", "less than 640 MiB"),
        ("--node-config gpu-memory='300MiB'", "gpu-memory='300MiB'", "CUDA's own context takes 512 MiB"),
    ],
)
def test_what_is_refused_is_named_as_it_was_written(
    line: str, asked: str, words: str, plan_on: PlanOn
) -> None:
    ((_, refused),) = plan_on(line, FLOWER_GPU_MEMORY="1GiB")
    assert refused is not None
    assert refused.startswith(f"client 0 and client 1: --node-config {asked}: ") and words in refused


def test_what_has_no_effect_is_named_as_it_was_written(plan_on: PlanOn) -> None:
    never, not_wanted = plan_on(
        "--node-config gpu-memory='4GiB' --node-config gpu='never'",
        "--gpu-memory 3GiB --use-gpu false --node-config num-gpus=0.5",
    )
    assert never[0] == [
        "note: --node-config gpu-memory='4GiB' has no effect: calls of client 0 and client 1 run on the CPU, "
        "the device policy is never"
    ]
    assert not_wanted[0] == [
        "note: --node-config num-gpus=0.5 has no effect: calls of client 0 and client 1 run on the CPU, "
        "use-gpu is false",
        "note: --gpu-memory 3GiB has no effect: calls of the server run on the CPU, use-gpu is false",
    ]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--node-config gpu-memory='2G'", "gpu-memory in the node config='2G' is no size of memory"),
        ("--node-config gpu-memory=5", "gpu-memory in the node config=5 is 5 bytes, too little"),
        ("--node-config num-gpus='half'", "num-gpus in the node config must be a number such as 0.25"),
        ("--node-config num-gpus=1.5", "num-gpus in the node config=1.5 is neither a share"),
        (
            "--node-config num-gpus=1 --node-config gpu-memory='2GiB'",
            "num-gpus in the node config=1 and gpu-memory in the node config='2GiB' are both given; give one",
        ),
    ],
)
def test_wrong_values_in_a_node_config_are_refused(line: str, words: str, plan_on: PlanOn) -> None:
    ((_, refused),) = plan_on(line)
    assert refused is not None and words in refused
