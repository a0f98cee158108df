"""`flower-gpu launch` checks its GPU options against the GPUs of the host before any process starts."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from launch_helpers import PlanOn, plan_of
from nvml_stub import GIB, Host
from run_programs import run

from flower_gpu.apps.folder import RunFolder
from flower_gpu.calls.settings import call_settings
from flower_gpu.launch.federation import client_environment, service_environment
from flower_gpu.launch.run import remarks_at_end
from flower_gpu.watch.history import History

REFUSED = [
    # Arguments, and words of the error: the request that does not fit, and the largest one that would.
    ("--gpu-memory 100GiB", "--gpu-memory 100GiB GPU 0 (NVIDIA Stub 16GB) has 16128MiB at most 16128MiB"),
    ("--gpu-memory 16129MiB", "--gpu-memory 16129MiB at most 16128MiB"),
    ("--gpu-memory 300MiB", "--gpu-memory 300MiB context 512 MiB more than"),
    ("--num-gpus 4", "--num-gpus 4 may use 2 GPU 0 GPU 1 at most 2"),
    ("--num-gpus 2 --gpu-ids 0,1", "--num-gpus 2 may use 1 --gpu-ids each client one --node-config gpu-ids"),
    ("--num-gpus 0.01", "--num-gpus 0.01 640 MiB at least 0.05"),
    ("--gpu require --gpu-ids 0,7", "client 1: require no GPU 7 GPU 0 GPU 1"),
    ("--node-config gpu-ids=7 --node-config gpu='require'", "client 0 and client 1: require no GPU 7"),
    ("--gpu require --gpu-ids GPU-nope", "require GPU-nope"),
]

BOTH = "calls run on GPU 0 (NVIDIA Stub 16GB), GPU 1 (NVIDIA Stub 16GB): as many at a time as fit"
GPU_0, GPU_1 = "GPU 0 (NVIDIA Stub 16GB)", "GPU 1 (NVIDIA Stub 16GB)"
NO_EFFECT = "all calls run on the CPU"
POSSIBLE = {
    "": [BOTH],
    "--gpu require": [BOTH],
    "--gpu force --num-gpus 2": [BOTH],
    "--num-gpus 2 --node-config gpu-ids='0,1'": [],
    "--gpu-memory 4GiB": [
        f"leases: 4.0 GiB of one GPU for a call; {GPU_0} has room for 3 at a time, "
        f"{GPU_1} has room for 3 at a time"
    ],
    "--gpu-memory 16128MiB --gpu-ids 1": [
        f"leases: 15.8 GiB of one GPU for a call; {GPU_1} has room for 1 at a time"
    ],
    "--num-gpus 0.05 --gpu-ids 0": [
        f"leases: 0.05 of one GPU for a call; {GPU_0} has room for 20 at a time"
    ],
    "--gpu-ids 0,7": [
        f"note: client 1: there is no GPU 7; used instead: all that there are, {GPU_0}, {GPU_1}",
        f"note: the server: there is no GPU 7; used instead: the others that were named, {GPU_0}",
    ],
    "--gpu never --gpu-memory 100GiB": [
        f"note: --gpu-memory 100GiB has no effect: {NO_EFFECT}, the device policy is never"
    ],
    "--use-gpu false --num-gpus 4": [
        "note: --num-gpus 4 has no effect except for distributed functions, which run in 4 ranks: "
        f"{NO_EFFECT}, use-gpu is false"
    ],
    "--gpu force --use-gpu false": [
        "note: this node's policy is force: a GPU is used although the server does not request one", BOTH
    ],
}  # fmt: skip


def test_a_request_that_no_gpu_can_ever_satisfy_is_refused(plan_on: PlanOn, host: Host) -> None:
    answers = plan_on(host, *(line for line, _ in REFUSED))
    for (line, words), (_, refused) in zip(REFUSED, answers, strict=True):
        assert refused is not None and "\n" not in refused, line
        assert [word for word in words.split() if word not in refused] == [], refused


def test_a_request_that_a_gpu_can_satisfy_is_accepted(plan_on: PlanOn, host: Host) -> None:
    answers = plan_on(host, *POSSIBLE)
    assert answers == [(remarks, None) for remarks in POSSIBLE.values()]


def test_only_usable_and_visible_gpus_count(plan_on: PlanOn, host: Host) -> None:
    host.set(1, total=8 * GIB)
    (_, all_seen), (_, hidden) = plan_on(
        host, "--gpu-memory 10GiB", ("--gpu-memory 10GiB", {"CUDA_VISIBLE_DEVICES": "1"})
    )
    assert (
        all_seen is None
        and hidden is not None
        and "GPU 1" in hidden
        and "GPU 0" not in hidden
        and "at most 7936MiB" in hidden
    )
    host.set(0, lost=True)
    (_, lost), (_, fits) = plan_on(host, "--gpu-memory 10GiB", "--gpu-memory 7936MiB")
    assert lost is not None and "at most 7936MiB" in lost and fits is None


def test_memory_of_other_programs_does_not_refuse_a_request_but_the_reserve_does(
    plan_on: PlanOn, host: Host
) -> None:
    for number in range(2):
        host.set(number, used=15 * GIB)
    (_, fits), (_, refused) = plan_on(
        host, "--gpu-memory 8GiB", ("--gpu-memory 10GiB", {"FLOWER_GPU_RESERVE": "8GiB"})
    )
    assert fits is None and refused is not None and "at most 8192MiB" in refused


def test_requests_in_environment_variables_are_checked_too(plan_on: PlanOn, host: Host) -> None:
    size, gpus = {"FLOWER_GPU_MEMORY": "100GiB"}, {"FLOWER_GPU_NUM_GPUS": "4"}
    wanted = {"FLOWER_GPU_POLICY": "require", "FLOWER_GPU_IDS": "5"}
    lines = [(line, size) for line in ("", "--gpu-memory 1GiB", "--num-gpus 0.5")]
    lines += [(line, gpus) for line in ("", "--num-gpus 0.5", "--gpu-memory 1GiB")]
    answers = plan_on(host, *lines, ("", wanted), ("--gpu-ids 1", wanted))
    memory, share, policy = answers[:3], answers[3:6], answers[6:]
    assert memory[0][1] is not None and memory[0][1].startswith("FLOWER_GPU_MEMORY=100GiB: no GPU")
    assert [refused for _, refused in memory[1:]] == [None, None], "an option overrides the variable"
    assert share[0][1] is not None and share[0][1].startswith("FLOWER_GPU_NUM_GPUS=4: a call may use 2")
    assert [refused for _, refused in share[1:]] == [None, None]
    assert policy[0][1] is not None and "there is no GPU 5" in policy[0][1]
    assert policy[1] == (["calls run on GPU 1 (NVIDIA Stub 16GB): as many at a time as fit"], None)


def test_remarks_on_a_host_without_a_gpu(plan_on: PlanOn) -> None:
    nothing, memory, force, require, wanted, never = plan_on(
        None,
        "",
        "--gpu-memory 100GiB",
        "--gpu force",
        "--gpu require",
        "--use-gpu true",
        "--gpu never",
    )
    on_cpu = "calls run on the CPU, up to 2 at a time"
    # The default `use-gpu = true` in the app's config does not cause a warning.
    assert nothing == ([f"no GPU here: {on_cpu}"], None)
    assert never == ([f"the device policy is never: {on_cpu}"], None)
    assert memory[0] == [
        "note: --gpu-memory 100GiB has no effect: all calls run on the CPU, no GPU can be used here (see "
        "flower-gpu gpus)"
    ]
    assert force[0] and "policy is force, but no GPU can be used, so this call runs on the CPU" in force[0][0]
    assert require[1] and "policy is require" in require[1]
    assert wanted[0] and "runs on the CPU although the server requests a GPU" in wanted[0][0]


def test_a_refused_plan_ends_the_launcher_with_2_and_leaves_nothing(tiny_app: Path, host: Host) -> None:
    runs = tiny_app.parent / "runs"
    command = [sys.executable, "-m", "flower_gpu.cli", "launch", str(tiny_app), "--log-dir", str(runs)]
    done = run([*command, "--gpu-memory", "100GiB"], env={**os.environ, **host.env})
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("flower-gpu launch: --gpu-memory 100GiB: ")
    assert not runs.exists()


def gpu_variables(env: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name in ("FLOWER_GPU_POLICY", "FLOWER_GPU_IDS")}


def test_gpus_are_dealt_out_to_the_clients_and_the_server_may_use_all(tiny_app: Path) -> None:
    plan = plan_of(tiny_app, "--clients 5 --gpu-ids 1,GPU-89 --gpu offer")
    configs = [plan.node_config_of(client) for client in range(5)]
    assert [config["gpu-ids"] for config in configs] == [1, "GPU-89", 1, "GPU-89", 1]
    assert {config["gpu"] for config in configs} == {"offer"}
    assert [config["partition-id"] for config in configs] == [0, 1, 2, 3, 4]
    env = service_environment({}, RunFolder(tiny_app), plan.options.calls)
    assert gpu_variables(env) == {"FLOWER_GPU_POLICY": "offer", "FLOWER_GPU_IDS": "1,GPU-89"}
    client = client_environment(env, 1, 5, configs[1])
    assert gpu_variables(client) == {"FLOWER_GPU_POLICY": "offer", "FLOWER_GPU_IDS": "GPU-89"}


@pytest.mark.parametrize(
    ("line", "base"),
    [
        ("--gpu never --gpu-ids 1", {}),
        ("--gpu never --gpu-ids 1", {"FLOWER_GPU_POLICY": "force", "FLOWER_GPU_IDS": "0"}),
        ("--node-config gpu='never' --node-config gpu-ids=1", {"FLOWER_GPU_POLICY": "force"}),
        ("--gpu never --node-config gpu-ids='1'", {"FLOWER_GPU_IDS": "0"}),
        ("", {"FLOWER_GPU_POLICY": "never", "FLOWER_GPU_IDS": "1"}),
    ],
)
def test_code_gets_the_same_policy_with_and_without_the_context(
    line: str, base: dict[str, str], tiny_app: Path
) -> None:
    plan = plan_of(tiny_app, line)
    node_config = plan.node_config_of(0)
    env = client_environment(
        service_environment(base, RunFolder(tiny_app), plan.options.calls), 0, 2, node_config
    )
    policies = [
        call_settings({"gpu": "require"}, base=env, node_config=config).gpu.policy
        for config in (node_config, {})
    ]
    assert policies[0] == policies[1]
    assert (policies[0].gpu, tuple(map(str, policies[0].gpu_ids or ()))) == ("never", ("1",))


@pytest.mark.parametrize(
    ("line", "leases", "remark"),
    [
        (
            "--use-gpu false",
            3,
            "use-gpu is false, but 3 calls leased a GPU: tiny must",
        ),
        ("--use-gpu false", 0, ""),
        ("--use-gpu true", 3, ""),
        ("--use-gpu false --gpu force", 3, ""),
    ],
)
def test_an_app_that_does_not_obey_use_gpu_is_named(
    line: str, leases: int, remark: str, tiny_app: Path
) -> None:
    pyproject = tiny_app / "pyproject.toml"
    pyproject.write_text(pyproject.read_text().replace('text = ""', 'text = ""\nuse-gpu = true'))
    history = History()
    history.feed({"event": "lease_granted", "time": 1.0, "lease": str(number)} for number in range(leases))
    remarks = list(remarks_at_end(plan_of(tiny_app, line), history))
    assert [text[: len(remark)] for text in remarks] == [remark] if remark else remarks == []


STARTED = {"event": "run_started", "time": 1.0, "gpus": [{"uuid": "GPU-1", "index": 0, "name": "a card"}]}
WORKER = {"event": "worker_started", "time": 2.0, "pid": 7, "call": "c"}
ROUND = {"event": "round_finished", "time": 3.0, "round": 1, "task": "train", "messages": 2, "failed": 0}


@pytest.mark.parametrize(
    ("line", "events", "has_remark"),
    [
        ("", [STARTED, ROUND], True),
        ("", [STARTED, WORKER, ROUND], False),
        ("", [{**STARTED, "gpus": []}, ROUND], False),
        ("", [STARTED], False),
        ("--gpu never", [STARTED, ROUND], False),
    ],
)
def test_an_app_whose_clients_have_no_leases_is_named(
    line: str, events: list[dict[str, Any]], has_remark: bool, tiny_app: Path
) -> None:
    history = History()
    history.feed(events)
    remarks = list(remarks_at_end(plan_of(tiny_app, line), history))
    assert ["no call of tiny had a lease" in text for text in remarks] == [True] * has_remark


# Requests in node configs ---------------------------------------------------------------------------------


def rooms(at_a_time: int, *gpus: int) -> str:
    return ", ".join(
        f"GPU {gpu} (NVIDIA Stub 16GB) has room for {at_a_time} at a time" for gpu in gpus or (0, 1)
    )


def test_remarks_say_how_many_calls_fit_for_clients_and_server(plan_on: PlanOn, host: Host) -> None:
    """The server has no node config, so only the options apply to it."""
    size, share, with_option, dealt_out, several = plan_on(
        host,
        "--node-config gpu-memory='4GiB'",
        "--node-config num-gpus=0.25",
        "--num-gpus 0.5 --node-config gpu-memory='4GiB'",
        "--gpu-ids 0,1 --node-config gpu-memory='4GiB'",
        "--node-config num-gpus=2",
    )
    of_clients = "leases: client 0 and client 1: 4.0 GiB of one GPU for a call; "
    assert size == ([f"{of_clients}{rooms(3)}"], None)
    assert share == ([f"leases: client 0 and client 1: 0.25 of one GPU for a call; {rooms(4)}"], None)
    assert with_option == (
        [f"{of_clients}{rooms(3)}", f"leases: the server: 0.5 of one GPU for a call; {rooms(2)}"],
        None,
    )
    assert dealt_out == (
        [f"leases: client {client}: 4.0 GiB of one GPU for a call; {rooms(3, client)}" for client in (0, 1)],
        None,
    )
    assert several == ([], None)


def test_nodes_with_equal_requests_share_a_remark(plan_on: PlanOn, host: Host) -> None:
    each = [{"gpu-memory": "7GiB"}, {"num-gpus": 0.25}, {"gpu-memory": "7168 MiB"}, {}, {"num-gpus": 1}]
    ((remarks, refused),) = plan_on(host, "--clients 5 --gpu-memory 2GiB", each=each)
    assert refused is None
    assert remarks == [
        f"leases: client 0 and client 2: 7.0 GiB of one GPU for a call; {rooms(2)}",
        f"leases: client 1: 0.25 of one GPU for a call; {rooms(4)}",
        f"leases: client 3 and the server: 2.0 GiB of one GPU for a call; {rooms(7)}",
        f"leases: client 4: 1 GPU for a call; {rooms(1)}",
    ]


def test_a_single_node_that_can_never_be_served_refuses_the_launch(plan_on: PlanOn, host: Host) -> None:
    each = [{}, {"gpu-memory": "100GiB"}, {"num-gpus": 1}]
    ((_, refused),) = plan_on(host, "--clients 3", each=each)
    assert refused is not None and refused.startswith("client 1: ")
    assert "no GPU has that much" in refused and "ask for at most 16128MiB" in refused
    # Both clients request two GPUs, but client 1 may use only one.
    each = [{"num-gpus": 2, "gpu-ids": "0,1"}, {"num-gpus": 2, "gpu-ids": 1}]
    ((_, refused),) = plan_on(host, "--clients 2", each=each)
    assert refused is not None and refused.startswith("client 1: ") and "a call may use 1 here" in refused


def test_a_refused_request_is_quoted_as_it_was_written(plan_on: PlanOn, host: Host) -> None:
    lines = [
        ("--node-config gpu-memory='100GiB'", "gpu-memory='100GiB'", "no GPU has that much"),
        ("--gpu-memory 2GiB --node-config gpu-memory='9TiB'", "gpu-memory='9TiB'", "no GPU has that much"),
        ("--node-config num-gpus=3", "num-gpus=3", "a call may use 2 here"),
        ("--num-gpus 1 --node-config num-gpus=0.01", "num-gpus=0.01", "less than 640 MiB"),
        ("--node-config gpu-memory='300MiB'", "gpu-memory='300MiB'", "CUDA's own context takes 512 MiB"),
    ]
    answers = plan_on(host, *(line for line, _, _ in lines), FLOWER_GPU_MEMORY="1GiB")
    for (_, request, words), (_, refused) in zip(lines, answers, strict=True):
        assert refused is not None
        assert refused.startswith(f"client 0 and client 1: --node-config {request}: ") and words in refused


def test_a_request_without_effect_is_quoted_as_it_was_written(plan_on: PlanOn, host: Host) -> None:
    never, not_wanted = plan_on(
        host,
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
