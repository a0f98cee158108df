"""An ordinary PyTorch app, unchanged, on SuperNodes of a host with stub GPUs: what its processes see."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from launched import events_of, most_at_a_time
from nvml_stub import GIB
from supernode_host import APP, Federation, logs_of, results_of, sights
from waiting import until

from flower_gpu.options import RESERVE

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

TOTAL = 16 * GIB
TIMEOUT_S = "15"


@pytest.fixture(scope="module")
def fed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    with Federation(tmp_path_factory.mktemp("leases")) as found:
        yield found


def assert_saw_their_leases(seen: Iterable[dict[str, Any]], trace: Path) -> None:
    """Check what the app's processes saw against the leases of their messages."""
    granted = {event["lease"]: event for event in events_of(trace, "lease_granted")}
    started = {event["pid"]: event for event in events_of(trace, "worker_started")}
    for sight in seen:
        worker = started[sight["pid"]]
        lease = granted[worker["lease"]]
        assert worker["client"] == lease["client"] == str(sight["partition"])
        assert worker["task"] == lease["task"] == sight["kind"]
        assert_held_to(lease, sight)


def assert_held_to(lease: dict[str, Any], sight: dict[str, Any]) -> None:
    [gpu] = lease["gpus"]
    assert sight["CUDA_VISIBLE_DEVICES"] == gpu["uuid"]
    name, _, fraction = sight["PYTORCH_ALLOC_CONF"].partition(":")
    assert name == "per_process_memory_fraction"
    # What PyTorch may take, and CUDA's context beside it.
    assert 0 < gpu["memory_bytes"] - float(fraction) * TOTAL < GIB
    assert sight["PYTORCH_CUDA_ALLOC_CONF"] is None


def workers_of(trace: Path) -> list[dict[str, Any]]:
    return events_of(trace, "worker_started", "worker_finished")


def with_gpu_mod(folder: Path) -> Path:
    """Make a copy of the app that asks for two GPUs by itself."""
    app = Path(shutil.copytree(APP, folder))
    code = app / "unchanged_app" / "client_app.py"
    mod = "gpu_mod(num_gpus=2, lease_timeout_s=5)"
    old, new = "app = ClientApp()", f"from flower_gpu import gpu_mod\n\napp = ClientApp(mods=[{mod}])"
    assert old in code.read_text()
    code.write_text(code.read_text().replace(old, new))
    return app


def test_the_app_knows_nothing_of_flower_gpu() -> None:
    for path in APP.rglob("*.py"):
        assert not re.search(r"flower.gpu", path.read_text(), re.IGNORECASE), path


def test_supernodes_share_two_gpus_and_the_app_sees_its_lease(fed: Federation) -> None:
    """Two leases fit on a GPU, so one of the five messages has to wait; four of them end badly."""
    with fed.one_test(), fed.host.observed() as looks:
        nodes = fed.supernodes(5, "--gpu-memory", "6GiB", "--timeout-s", TIMEOUT_S)
        run = fed.run(
            num_clients=5,
            num_server_rounds=2,
            rounds_without_gpu="2",
            fraction_evaluate=1.0,
            bugs="1/1=raise 1/2=hang 1/3=exit 1/4=kill",
            pause_folder=str(fed.pauses),
        )
        until(lambda: len(fed.held(1)) == 4, "four messages train")
        until(lambda: len(fed.waiting()) == 1, "the last one waits for a lease")
        assert len(fed.held(1)) == len(fed.holders()) == 4
        for number in (1, 2):
            fed.let_go(number)
        assert run.wait(150) == 0
        trace = logs_of(fed, nodes)
        for told in ("5 of 5 SuperNodes", "Option `--insecure` was set"):
            assert nodes.output.count(told) == 1, "of the logs of all five"

        seen = [sight for log in trace.glob("*.log") for sight in sights(log.read_text())]
        first, second = ([one for one in seen if one["round"] == number] for number in (1, 2))
        assert [one["kind"] for one in first].count("train") == len(first) - 5 == 5
        assert_saw_their_leases(first, trace)
        assert_saw_their_leases([one for one in second if one["kind"] == "evaluate"], trace)
        trained = [one["CUDA_VISIBLE_DEVICES"] for one in second if one["kind"] == "train"]
        assert trained == [""] * 5
        granted = events_of(trace, "lease_granted")
        assert len(granted) == 5 + 2 * 5, "none for training in the round without GPUs"
        assert {gpu["index"] for event in granted for gpu in event["gpus"]} == {0, 1}
        for finished in events_of(trace, "worker_finished"):
            for gpu in finished.get("gpus", ()):
                assert gpu["lease_bytes"] == 6 * GIB > gpu["cap_bytes"] > 5 * GIB

        counted, reasons = results_of(run, 1)
        assert counted == "1 results and 4 failures"
        text = "\n".join(reasons)
        assert "train of client 1: ValueError: the data are gone" in text
        assert f"train of client 2: no result within timeout_s={TIMEOUT_S}" in text
        assert re.search(r"train of client 3: the worker \(pid \d+\) exited with code 7", text)
        assert re.search(r"train of client 4: the worker \(pid \d+\) was killed by SIGKILL \(9\)", text)
        assert "these are the last words" in text
        assert len(re.findall("train of client", text)) == 4
        assert results_of(run, 2) == ("5 results and 0 failures", [])

        for number in (1, 2):
            assert results_of(run, number, "evaluate")[0] == "5 results and 0 failures"
        until(lambda: fed.users_of_fork_servers() == 5, "each SuperNode has the fork server stay")

        assert not fed.holders()
    per_gpu = [sum(gpus.get(uuid, 0) for gpus in look.values()) for look in looks for uuid in fed.host.uuids]
    assert max(per_gpu) == 12 * GIB <= TOTAL - RESERVE.resolve(), "two on a GPU, and never a third one"
    assert set().union(*looks) <= {event["lease"] for event in granted}, "all leases are in the trace"
    assert most_at_a_time([one for one in workers_of(trace) if "lease" in one]) == 4


def test_what_the_nodes_say_goes_before_what_messages_say(fed: Federation, tmp_path: Path) -> None:
    """And before what the app asks for: this one has a mod that wants two GPUs."""
    with fed.one_test():
        fed.env["FLOWER_GPU_CPU_LEASES"] = "off"  # messages wait here for the test, and would for cores
        cpu = fed.supernodes(1, "--gpu", "never")
        options = {
            1: ("--gpu", "force", "--gpu-ids", "1", "--num-gpus", "0.5"),
            2: ("--gpu", "require", "--gpu-ids", "0"),
            3: ("--gpu", "force"),
        }
        of_node = {1: "", 2: "", 3: 'gpu="never"'}
        nodes = {
            client: fed.supernode(*options[client], node_config=f"partition-id={client} {of_node[client]}")
            for client in options
        }
        until(lambda: "Starting Flower SuperNode" in nodes[2].output, "the one that requires GPU 0 is there")
        fed.host.set(0, lost=True)
        run = fed.run(
            with_gpu_mod(tmp_path / "app"),
            num_clients=4,
            num_server_rounds=2,
            rounds_with_gpu="1",
            rounds_without_gpu="2",
            says='{"gpu": "force", "gpu-ids": 0, "num-gpus": 2, "gpu-memory": "1GiB"}',
            pause_folder=str(fed.pauses),
        )

        until(lambda: fed.held(1).keys() == {0, 1, 3}, "all others train")
        fed.let_go(1)
        fed.let_go(2)
        assert run.wait(120) == 0
        for number in (1, 2):
            counted, [reason] = results_of(run, number)
            assert counted == "3 results and 1 failures"
            assert "train of client 2: " in reason and "GPU 0" in reason

        seen = [
            *sights((logs_of(fed, cpu) / "supernode-0.log").read_text()),
            *(one for node in nodes.values() for one in sights(node.output)),
        ]
        gpus = {(one["partition"], one["round"]): one["CUDA_VISIBLE_DEVICES"] for one in seen}
        assert gpus == {
            **{(client, number): "" for client in (0, 3) for number in (1, 2)},
            **{(1, number): fed.host.uuids[1] for number in (1, 2)},
        }
        assert not events_of(logs_of(fed, cpu), "lease_granted")
        assert_saw_their_leases([one for one in seen if one["partition"] == 1], fed.trace)
        half = int((TOTAL - RESERVE.resolve()) * 0.5)
        for event in events_of(fed.trace, "lease_granted"):
            assert event["client"] == "1" and 0.9 * half < event["gpus"][0]["memory_bytes"] <= half
        assert len(events_of(fed.trace, "lease_granted")) == 2
