"""What nodes ask for in their configs (``num-gpus``, ``gpu-memory``) is held against the host, too."""

from __future__ import annotations

from launch_helpers import PlanOn
from nvml_stub import Host


def rooms(at_a_time: int, *gpus: int) -> str:
    return ", ".join(
        f"GPU {gpu} (NVIDIA Stub 16GB) has room for {at_a_time} at a time" for gpu in gpus or (0, 1)
    )


def test_how_many_fit_is_said_for_clients_and_server(plan_on: PlanOn, host: Host) -> None:
    """The server has no node config: what an option says holds for it."""
    size, share, beside, dealt_out, several = plan_on(
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
    assert beside == (
        [f"{of_clients}{rooms(3)}", f"leases: the server: 0.5 of one GPU for a call; {rooms(2)}"],
        None,
    )
    assert dealt_out == (
        [f"leases: client {client}: 4.0 GiB of one GPU for a call; {rooms(3, client)}" for client in (0, 1)],
        None,
    )
    assert several == ([], None)


def test_nodes_are_put_together_by_what_they_ask_for(plan_on: PlanOn, host: Host) -> None:
    each = [{"gpu-memory": "7GiB"}, {"num-gpus": 0.25}, {"gpu-memory": "7168 MiB"}, {}, {"num-gpus": 1}]
    ((remarks, refused),) = plan_on(host, "--clients 5 --gpu-memory 2GiB", each=each)
    assert refused is None
    assert remarks == [
        f"leases: client 0 and client 2: 7.0 GiB of one GPU for a call; {rooms(2)}",
        f"leases: client 1: 0.25 of one GPU for a call; {rooms(4)}",
        f"leases: client 3 and the server: 2.0 GiB of one GPU for a call; {rooms(7)}",
        f"leases: client 4: 1 GPU for a call; {rooms(1)}",
    ]


def test_one_node_that_can_never_be_served_is_enough_to_refuse(plan_on: PlanOn, host: Host) -> None:
    each = [{}, {"gpu-memory": "100GiB"}, {"num-gpus": 1}]
    ((_, refused),) = plan_on(host, "--clients 3", each=each)
    assert refused is not None and refused.startswith("client 1: ")
    assert "no GPU can ever give so much" in refused and "ask for at most 16128MiB" in refused
    # Nor what it may not have: the same request, but of a GPU that is another one's.
    each = [{"num-gpus": 2, "gpu-ids": "0,1"}, {"num-gpus": 2, "gpu-ids": 1}]
    ((_, refused),) = plan_on(host, "--clients 2", each=each)
    assert refused is not None and refused.startswith("client 1: ") and "a call may use 1 here" in refused


def test_what_is_refused_is_named_as_it_was_written(plan_on: PlanOn, host: Host) -> None:
    lines = [
        ("--node-config gpu-memory='100GiB'", "gpu-memory='100GiB'", "no GPU can ever give so much"),
        ("--gpu-memory 2GiB --node-config gpu-memory='9TiB'", "gpu-memory='9TiB'", "no GPU can ever give"),
        ("--node-config num-gpus=3", "num-gpus=3", "a call may use 2 here"),
        ("--num-gpus 1 --node-config num-gpus=0.01", "num-gpus=0.01", "less than 640 MiB"),
        ("--node-config gpu-memory='300MiB'", "gpu-memory='300MiB'", "CUDA's own context takes 512 MiB"),
    ]
    answers = plan_on(host, *(line for line, _, _ in lines), FLOWER_GPU_MEMORY="1GiB")
    for (_, asked, words), (_, refused) in zip(lines, answers, strict=True):
        assert refused is not None
        assert refused.startswith(f"client 0 and client 1: --node-config {asked}: ") and words in refused


def test_what_has_no_effect_is_named_as_it_was_written(plan_on: PlanOn, host: Host) -> None:
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


def test_wrong_values_in_a_node_config_are_refused(plan_on: PlanOn, host: Host) -> None:
    lines = {
        "--node-config gpu-memory='2G'": "--node-config gpu-memory='2G' is no size of memory",
        "--node-config gpu-memory=5": "--node-config gpu-memory=5 is 5 bytes, too little",
        "--node-config num-gpus='half'": "--node-config num-gpus must be a share of one GPU such as 0.25",
        "--node-config num-gpus=1.5": "(for no GPU, give the policy never), not 1.5",
        "--node-config num-gpus=1 --node-config gpu-memory='2GiB'": (
            "--node-config num-gpus=1 and --node-config gpu-memory='2GiB' are both given; give one"
        ),
    }
    for words, (_, refused) in zip(lines.values(), plan_on(host, *lines), strict=True):
        assert refused is not None and words in refused
