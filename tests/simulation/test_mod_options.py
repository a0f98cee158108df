"""The options of an app's own `gpu_mod` apply to its clients in a simulation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from stub_host import StubHost, events

from flower_gpu import distributed, gpu_mod, simulate
from flower_gpu.apps.app_imports import is_more_than_listed
from flower_gpu.errors import ConfigError
from flower_gpu.simulation.clients import Clients, overrides_of_app
from flower_gpu.simulation.nodes import VirtualNodes

pytestmark = pytest.mark.timeout(200)

NODES = VirtualNodes(3, 1, 7, {"batch": 4})


def resources(context: Context) -> dict[str, Any] | None:
    """Return options for two of the clients."""
    if context.node_config["partition-id"] == 2:
        return None
    return {"gpu_memory": f"{context.run_config['batch']}GiB", "timeout_s": 9}


def test_the_mods_of_each_function_return_options_for_each_client() -> None:
    app = ClientApp(mods=[gpu_mod(resources=resources, num_gpus=0.5, on_oom="fail")])
    app.train()(lambda message, context: message)
    app.train("more", mods=[gpu_mod(num_cpus=2, num_gpus=0.1)])(lambda message, context: message)
    app.query()(distributed(num_gpus=2)(lambda message, context: message))
    client_options = {"gpu_memory": "4GiB", "timeout_s": 9}
    assert overrides_of_app(app, NODES, {}) == {
        "train": [client_options, client_options, {"num_gpus": 0.5}],
        "train.more": [{"num_cpus": 2, "num_gpus": 0.1}] * 3,
        "query": [{"num_gpus": 2, "timeout_s": 9}] * 2 + [{"num_gpus": 2}],
    }
    table: Any = {1: {"timeout_s": 3, "gpu": "require"}, 2: {"gpu": "never"}}
    older = ClientApp(lambda context: None, mods=[gpu_mod(resources=table)])
    assert overrides_of_app(older, NODES, {}) == {"": [{}, {"timeout_s": 3}, {"gpu": "never"}]}
    assert overrides_of_app(ClientApp(mods=[gpu_mod]), NODES, {}) == {}


def test_options_of_the_user_override_those_of_the_app() -> None:
    app_options = {"train": [{"num_gpus": 0.5, "timeout_s": 9}] * 3}
    clients = Clients.of({2: {"gpu-memory": "2GiB"}, "1-2": {"slow-down": 2}}, 3)
    merged = clients.with_app(app_options, {"num_gpus": None})
    options = [merged.of_client(partition, "train.default") for partition in range(3)]
    assert options[0] == {"num_gpus": 0.5, "timeout_s": 9}
    assert options[1] == {"num_gpus": 0.5, "timeout_s": 9, "slow_down": 2}
    assert options[2] == {"gpu_memory": "2GiB", "timeout_s": 9, "slow_down": 2}
    assert merged.of_client(1, "evaluate") == {"slow_down": 2}
    with_user_option = clients.with_app(app_options, {"gpu_memory": "3GiB"})
    assert with_user_option.of_client(0, "train") == {"timeout_s": 9} and with_user_option.of_client(0) == {}


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (lambda context: {"num_gpus": 0.5, "num_cpu": 2}, "no option 'num_cpu'"),
        (lambda context: {"num_gpus": 1.5}, "num_gpus must be a share of one GPU"),
        (
            lambda context: context.state["made"],
            r"raised KeyError.* when context\.state is empty",
        ),
    ],
)
def test_options_of_an_app_are_checked_before_the_run(returned: Any, words: str) -> None:
    app = ClientApp(mods=[gpu_mod(resources=returned)])
    app.train()(lambda message, context: message)
    with pytest.raises(ConfigError, match=words):
        overrides_of_app(app, NODES, {})


@pytest.mark.parametrize("place", ["mod", "table", "option"])
def test_a_share_of_processors_without_mps_is_refused_in_any_setting(place: str) -> None:
    client = ClientApp(mods=[gpu_mod(gpu_compute=0.5)] if place == "mod" else [])
    client.train()(lambda message, context: message)
    options: dict[str, Any] = {
        "table": {"clients": {1: {"gpu-compute": 0.5}}},
        "option": {"gpu_compute": 0.5},
    }.get(place, {})
    with pytest.raises(ConfigError, match=r"gpu_compute .* mps \(--mps\) only"):
        simulate((ServerApp(), client), 2, log_dir=None, **options)


@pytest.mark.parametrize(
    ("source", "is_asked"),
    [
        ("from flower_gpu import gpu_mod\napp = ClientApp(mods=[other_mod, gpu_mod])", False),
        ("from flower_gpu import gpu_mod\napp = ClientApp(mods=[gpu_mod(num_gpus=1)])", True),
        ("import flower_gpu\napp = ClientApp(mods=[flower_gpu.gpu_mod()])", True),
        ("from flower_gpu import gpu_mod as mod\napp = ClientApp(mods=[mod()])", True),
        ("from flower_gpu import gpu_mod\nmod = partial(gpu_mod, num_gpus=1)", True),
        ("from .mods import MODS\napp = ClientApp(mods=MODS)", True),
        ("import flower_gpu\napp = ClientApp()", False),
    ],
)
def test_an_app_that_uses_gpu_mod_is_recognized_by_its_source(
    tmp_path: Path, source: str, is_asked: bool
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").touch()
    (tmp_path / "mine" / "client_app.py").write_text(source)
    (tmp_path / "mine" / "mods.py").write_text("from flower_gpu import gpu_mod\nMODS = [gpu_mod(num_gpus=1)]")
    assert is_more_than_listed(tmp_path, "mine.client_app", "gpu_mod") == is_asked


def test_each_call_has_the_share_that_the_app_requests(tmp_path: Path) -> None:
    host = StubHost(tmp_path, gpus=1)
    table = tmp_path / "devices.toml"
    table.write_text('[3]\nnum-gpus = 1\n[0]\ngpu = "never"\n')
    done = host.simulate(4, "--gpu", "require", "--clients-table", str(table), app="sized")
    assert done.status == 0 and done.summary["failed"] == 0, done.output
    granted = {event["lease"]: event["gpus"][0]["memory_bytes"] for event in events(done, "lease_granted")}
    calls = [call for call in done.calls if call["task"] == "train"]
    leases = {(call["client"], granted.get(call.get("lease"))) for call in calls}
    whole = max(granted.values())
    parts = {"0": None, "1": whole // 4, "2": whole // 2, "3": whole}
    assert len(calls) == 8 and leases == set(parts.items())
    assert {call["client"]: call["own"] for call in calls}["2"] == {"num-gpus": 0.5}
