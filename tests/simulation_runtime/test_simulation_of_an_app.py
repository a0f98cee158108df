"""`flwr run` of an app in the Simulation Runtime, with the one line for gpu_mod, next to a plain loop."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nvml_stub import GIB
from simulation_host import FOLDER, NewHost, SimulationHost, notes

from flower_gpu.launch import ports

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

CLIENTS, ROUNDS, ACTORS = 5, 2, 3
PLAIN = "app = ClientApp(mods=[actor_noted])\n"
# Nearly all memory of a GPU can be leased. Many of these requests do not fit next to each other.
WITH_MOD = """
from flower_gpu import gpu_mod


def resources(context):
    kinds = {"num_gpus": 0.25}, {"gpu_memory": "5GiB"}, {"gpu_memory": "9GiB"}, {"num_gpus": 1}, None
    return kinds[context.node_config["partition-id"] % len(kinds)]


app = ClientApp(mods=[actor_noted, gpu_mod(gpu_memory="2GiB", resources=resources)])
"""
SIMULATION = f"num-supernodes={CLIENTS} client-resources-num-cpus=1 init-args-num-cpus="


# : The training of the same app in a single process: FedAvg's mean of the clients' results.
LOOP = """
import sys
import numpy as np
from digits_app import task

clients, rounds, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
state = task.initial_state()
for server_round in range(1, rounds + 1):
    found = [task.train(state, number, clients, 1000 * server_round + number) for number in range(clients)]
    total = sum(images for _, images in found)
    state = {name: sum(one[name] * (images / total) for one, images in found) for name in state}
np.savez(path, **{name: array.numpy() for name, array in state.items()})
"""


@dataclass
class Simulated:
    """Files of a finished run."""

    notes: Path
    output: str

    def weights(self) -> dict[str, np.ndarray]:
        return dict(np.load(self.notes / "weights.npz"))

    def actors(self) -> list[dict[str, Any]]:
        return notes(self.notes / "actors.jsonl")

    def fits(self) -> list[dict[str, Any]]:
        return notes(self.notes / "fits.jsonl")


@pytest.fixture(scope="module")
def host(new_host: NewHost) -> Iterator[SimulationHost]:
    """A host with a SuperLink. `flwr run` would start one as well, but give up after 15 s."""
    host = new_host(gpus=2)
    [port] = ports.free_ports(1)
    flwr_home = host.new_folder("home/.flwr")
    config = f'[superlink.here]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
    (flwr_home / "config.toml").write_text(config)
    command = ["flower-superlink", "--insecure", "--simulation", "--host", "127.0.0.1", "--port", str(port)]
    link = host.start(*command, name="superlink")
    link.until(lambda: ports.is_healthy(port))
    yield host
    host.end(link.process.pid)


@pytest.fixture(scope="module")
def seen() -> list[dict[str, tuple[int, int]]]:
    return []


@pytest.fixture(scope="module")
def with_mod(host: SimulationHost, seen: list[Any]) -> Simulated:
    app = host.folder / "with-mod"
    shutil.copytree(FOLDER / "digits_app", app, ignore=shutil.ignore_patterns("__pycache__"))
    path = app / "digits_app" / "client_app.py"
    text = path.read_text()
    assert PLAIN in text and "flower_gpu" not in text
    path.write_text(text.replace(PLAIN, WITH_MOD))
    folder = host.new_folder("with-mod-notes")
    command = ["flwr", "run", app, "here", "--stream", "--federation-config", f"{SIMULATION}{ACTORS}"]
    config = f"notes='{folder}' num-clients={CLIENTS} num-server-rounds={ROUNDS}"
    with host.observed() as looks:
        output = host.run(*command, "--run-config", config, name="with-mod")
    assert (folder / "weights.npz").exists(), output
    seen += looks
    return Simulated(folder, output)


def test_the_weights_are_those_of_a_plain_loop(host: SimulationHost, request: pytest.FixtureRequest) -> None:
    path = host.folder / "loop.npz"
    env = {"PYTHONPATH": str(FOLDER / "digits_app")}
    loop = host.start(sys.executable, "-c", LOOP, str(CLIENTS), str(ROUNDS), path, name="loop", **env)
    # The loop runs while processes of the simulation start.
    with_mod: Simulated = request.getfixturevalue("with_mod")
    assert len(with_mod.fits()) == CLIENTS * ROUNDS, with_mod.output
    loop.succeeded()
    expected, weights = dict(np.load(path)), with_mod.weights()
    assert expected.keys() == weights.keys() and len(expected) == 4, "two layers"
    for name, array in expected.items():
        np.testing.assert_allclose(
            weights[name], array, rtol=0, atol=1e-5, err_msg=f"{name}\n{with_mod.output}"
        )


def test_each_client_is_limited_to_its_request_and_leases_never_exceed_the_gpu(
    host: SimulationHost, with_mod: Simulated, seen: list[dict[str, tuple[int, int]]]
) -> None:
    share = (16 * GIB - 256 * 2**20) * 99 // 100
    expected = [share // 4, 5 * GIB, 9 * GIB, None, 2 * GIB]
    granted = host.events("lease_granted")
    assert len(granted) == CLIENTS * ROUNDS
    for event in granted:
        (gpu,) = event["gpus"]
        size = expected[int(event["client"]) % len(expected)]
        if size is None:
            assert gpu["memory_bytes"] > 15 * GIB
        else:
            assert gpu["memory_bytes"] == pytest.approx(size, abs=2**20)
    leases = {event["lease"] for event in granted}
    assert leases == {event["lease"] for event in host.events("lease_released")}
    assert set().union(*seen) <= leases, "every lease is in the trace"
    assert max(map(len, seen)) >= 2, "they did run at the same time"
    for look in seen:
        for gpu in (0, 1):
            assert sum(size for index, size in look.values() if index == gpu) <= 16 * GIB - 256 * 2**20
    assert {gpu for look in seen for gpu, _ in look.values()} == {0, 1}


def test_every_fit_has_its_own_worker_that_sees_the_leased_gpu(
    host: SimulationHost, with_mod: Simulated
) -> None:
    granted = {event["lease"]: event for event in host.events("lease_granted")}
    started = {event["pid"]: event for event in host.events("worker_started")}
    fits = with_mod.fits()
    assert len({fit["pid"] for fit in fits}) == len(fits) == len(started)
    for fit in fits:
        worker = started[fit["pid"]]
        assert worker["client"] == str(fit["partition"])
        assert fit["visible"] == granted[worker["lease"]]["gpus"][0]["uuid"]
        assert worker["start_method"] == "forkserver"
        assert worker["threads"] == 1, "as many as Ray gives each actor"


def test_actors_do_not_import_the_training_framework(with_mod: Simulated) -> None:
    actors = with_mod.actors()
    assert len({note["pid"] for note in actors}) == ACTORS
    for note in actors:
        loaded = {*note["before"], *note["after"]}
        assert "digits_app.client_app" in loaded and "flower_gpu" in loaded
        assert not {"torch", "sklearn", "digits_app.task", "flower_gpu.pytorch"} & loaded


def test_actors_hold_no_gpu(with_mod: Simulated) -> None:
    for note in with_mod.actors():
        assert note["nvidia"] == []
        assert note["visible"] == "", (
            "Ray hides the GPUs from actors with num-gpus=0; from workers it does not"
        )


def test_state_written_in_a_worker_is_available_in_the_next_round(with_mod: Simulated) -> None:
    for partition in range(CLIENTS):
        counts = [note["fits"] for note in with_mod.actors() if note["partition"] == partition]
        assert counts == list(range(1, ROUNDS + 1))
