"""The plan of a run: the checked options, joined with the options of a resumed run."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from flower_gpu.apps.app import FlowerApp, with_rounds
from flower_gpu.apps.folder import RunFolder, check_same_app, earlier_run
from flower_gpu.calls.settings import call_settings
from flower_gpu.errors import ConfigError
from flower_gpu.gpu import guard
from flower_gpu.options import CallOptions, flag
from flower_gpu.simulation import determinism
from flower_gpu.simulation.clients import Clients, overrides_of_app, plain, settings_of
from flower_gpu.simulation.host import MANY, Hosts, Work
from flower_gpu.simulation.in_worker import AppReference
from flower_gpu.simulation.nodes import VirtualNodes
from flower_gpu.simulation.options import OPTIONS, ClientOutputWord, OrderWord
from flower_gpu.watch.trackers import tracking
from flower_gpu.workers.call import checked_preload
from flower_gpu.workers.threads import cores

_SEEDS: Final = 1 << 31
_UNNAMED: Final = "app"  # name of an app without a folder


@dataclass(frozen=True)
class RunPlan:
    """The plan of a run: its options, checked and complete.

    ``work``: description of the run for hosts.
    ``server``: the ServerApp, or where to find it.
    ``app_folder``: folder of the app, or None.
    ``server_env``: environment variables of a deterministic ServerApp.
    ``folder``: folder of the earlier run to resume, or None.
    ``earlier``: settings of the earlier run, or empty.
    ``log_dir``: parent of the new run's folder, or None.
    ``order``, ``keep_going``, ``trackers``, ``ray_address``, ``client_output``: as for
    :func:`flower_gpu.simulate`.
    ``state_memory_bytes``: maximum memory for the nodes' states.
    ``clients_table``: settings of single clients, with keys as in a file.
    """

    work: Work
    server: ServerApp | str
    app_folder: Path | None
    server_env: Mapping[str, str]
    folder: RunFolder | None
    earlier: Mapping[str, Any]
    log_dir: Path | None
    order: OrderWord
    keep_going: bool
    trackers: tuple[str, ...]
    ray_address: str | None
    state_memory_bytes: int
    clients_table: Mapping[str, Mapping[str, Any]]
    options: CallOptions
    client_output: ClientOutputWord

    @property
    def resumes(self) -> bool:
        """True if the run resumes an earlier run."""
        return self.folder is not None

    @classmethod
    def of(
        cls,
        app: str | Path | tuple[ServerApp, ClientApp],
        arguments: Mapping[str, Any],
        run_config: Mapping[str, Any],
        trackers: str | Sequence[str] | None,
        options: CallOptions,
    ) -> RunPlan:
        """Return the plan for some options, joined with the options of an earlier run.

        ``arguments``: values of the simulation's options.
        ``options``: options of its calls.

        Raises ConfigError if an option cannot be used. Starts no process and writes no file.
        """
        values = {
            name: option.resolve(arguments[name]) for name, option in OPTIONS.items() if name in arguments
        }
        log_dir, resume = arguments["log_dir"], values["resume"]
        settings = call_settings(options)
        guard.check(os.environ)
        folder, earlier = (None, {}) if resume is None else earlier_run(resume, "simulate")
        name, app_folder, server, client = _components(app)
        check_same_app(earlier, name, app_folder, resume)
        run_config = with_rounds(run_config, values["rounds"], "rounds", "run_config")
        run_config = {**earlier.get("run_config", {}), **run_config}
        if app_folder is not None:
            run_config = FlowerApp.load(app_folder).simulated(run_config, values["num_supernodes"])
        seed = values["seed"]
        if seed is None:
            seed = earlier.get("seed")
        seed = secrets.randbelow(_SEEDS) if seed is None else seed
        table = arguments["clients"]
        table = earlier.get("clients_table", {}) if table is None else table
        clients = Clients.of(table, values["num_supernodes"])
        deterministic = values["deterministic"] or bool(earlier.get("deterministic"))
        server_env: dict[str, str] = {}
        env: dict[str, str] = dict(options.get("env") or {})
        if deterministic:
            determinism.check_interpreter()
            server_env = determinism.variables({**os.environ, **env}, earlier.get("threads", 1))
        # In a deterministic run, no client may see changes that another client made to modules.
        calls_per_worker = values["calls_per_worker"] or (1 if deterministic else MANY)
        if values["mps"]:
            _check_can_pack(deterministic, values["ray_address"])
        run_id = determinism.run_id(seed) if deterministic else secrets.randbits(63)
        nodes_with = partial(VirtualNodes, values["num_supernodes"], seed, run_id, run_config)
        clients = clients.with_app(overrides_of_app(client, nodes_with(), options), options)
        client_settings = [settings_of(settings, overrides) for overrides in clients.resources()]
        if not values["mps"] and any(client.gpu.compute is not None for client in client_settings):
            raise ConfigError(
                "gpu_compute (--gpu-compute, in the table of clients, or in a gpu_mod of the app) has "
                "an effect with mps (--mps) only. Add that, or remove it"
            )
        work = Work(
            name,
            client,
            call_settings(
                {**options, "context": None, "env": {**env, **server_env}}, run_config=run_config, named=flag
            ),
            nodes_with(clients),
            values["max_workers"],
            calls_per_worker,
            deterministic,
            is_strict=deterministic and not values["keep_going"],
            mps=values["mps"],
        )
        return cls(
            work,
            server,
            app_folder,
            server_env,
            folder,
            earlier,
            None if log_dir is None else values["log_dir"],
            values["order"],
            values["keep_going"],
            _checked_trackers(trackers, folder, log_dir),
            values["ray_address"],
            values["state_memory"],
            plain(table),
            options,
            values["client_output"],
        )

    def identity(self, hosts: Hosts) -> dict[str, Any]:
        """Return the values that a resumed run must share with the earlier one."""
        work = self.work
        identity = {"app": work.name, "num_supernodes": len(work.nodes.ids), "seed": work.nodes.seed}
        availability = [
            [pattern, entry["availability"]]
            for pattern, entry in self.clients_table.items()
            if "availability" in entry
        ]
        if availability:
            identity["availability"] = availability
        if work.is_deterministic:
            identity |= {"deterministic": True, "threads": hosts.info.threads}
        return identity

    def settings(self, hosts: Hosts) -> dict[str, Any]:
        """Return the settings for the trace of a new run."""
        work = self.work
        return {
            "deterministic": work.is_deterministic,
            "threads": hosts.info.threads,
            **self.identity(hosts),
            "app_folder": self.app_folder,
            "run_config": work.nodes.run_config,
            "max_workers": hosts.info.concurrency,
            "calls_per_worker": work.calls_per_worker,
            "mps": work.mps,
            "order": self.order,
            "state_memory_bytes": self.state_memory_bytes,
            "clients_table": self.clients_table,
            "options": {option: _recorded(option, value) for option, value in self.options.items()},
            "cores": cores(),
            **hosts.info.described,
        }


def _components(
    app: str | Path | tuple[ServerApp, ClientApp],
) -> tuple[str, Path | None, ServerApp | str, ClientApp | AppReference]:
    """Return an app's name, its folder or None, and its two components."""
    if isinstance(app, tuple):
        server, client = app
        if not isinstance(server, ServerApp) or not isinstance(client, ClientApp):
            raise TypeError("an app is a folder, or a ServerApp and a ClientApp")
        return _UNNAMED, None, server, client
    loaded = FlowerApp.load(Path(app))
    return loaded.name, loaded.path, loaded.serverapp, AppReference(loaded.path, loaded.clientapp)


def _check_can_pack(is_deterministic: bool, ray_address: str | None) -> None:
    if is_deterministic:
        raise ConfigError(
            "mps cannot be used with deterministic: libraries choose their sums by the number of processors "
            "that a worker has. Remove one of the two"
        )
    if ray_address is not None:
        raise ConfigError(
            "mps cannot be used with ray_address: its daemon is one machine's. Remove one of the two"
        )


def _checked_trackers(
    trackers: str | Sequence[str] | None, folder: RunFolder | None, log_dir: str | Path | None
) -> tuple[str, ...]:
    if trackers is None and folder is not None:
        trackers = tracking.known(folder.path)
    names = tracking.checked(trackers)
    if names and folder is None and log_dir is None:
        raise ConfigError(
            "trackers cannot be used with log_dir=None: they read the trace in the run's folder. "
            "Remove one of the two"
        )
    return names


def _recorded(option: str, value: Any) -> Any:
    """Return the value of an option for the trace.

    Environment variables and arguments may contain tokens, and many people read the trace, ``result.json``
    and trackers. So their names are recorded without their values.
    """
    if option == "env":
        return sorted(value or ())
    if option == "preload":
        return [f"{name}({', '.join(arguments)})" for name, arguments in checked_preload(value)]
    return value if isinstance(value, str | int | float | bool | None) else repr(value)
