"""The plan of a run: the checked options, joined with the options of a resumed run."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from flower_gpu.apps.app import FlowerApp, with_rounds
from flower_gpu.apps.folder import RunFolder, check_same_app, earlier_run
from flower_gpu.calls.grants import guard
from flower_gpu.calls.settings import call_settings, split
from flower_gpu.errors import ConfigError
from flower_gpu.options import CALL, flag
from flower_gpu.simulation import determinism
from flower_gpu.simulation.clients import Clients, overrides_of_app, plain, settings_of
from flower_gpu.simulation.host import MANY, Hosts, Work
from flower_gpu.simulation.in_worker import AppReference
from flower_gpu.simulation.nodes import VirtualNodes
from flower_gpu.simulation.options import NUM_SUPERNODES, OPTIONS, SimulationOptions
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
    ``options``: options of the simulation, with the values of the earlier run and the defaults.
    ``calls``: options of its calls, as they were given.
    """

    work: Work
    server: ServerApp | str
    app_folder: Path | None
    server_env: Mapping[str, str]
    folder: RunFolder | None
    earlier: Mapping[str, Any]
    options: SimulationOptions
    calls: Mapping[str, Any]

    @property
    def resumes(self) -> bool:
        """True if the run resumes an earlier run."""
        return self.folder is not None

    @classmethod
    def of(
        cls,
        app: str | Path | tuple[ServerApp, ClientApp],
        num_supernodes: int,
        options: SimulationOptions,
    ) -> RunPlan:
        """Return the plan for some options, joined with the options of an earlier run.

        Raises TypeError if an option does not exist.
        Raises ConfigError if an option cannot be used. Starts no process and writes no file.
        """
        calls, given = split(options)
        count = NUM_SUPERNODES.resolve(num_supernodes)
        values = _values(given)
        settings = call_settings(calls)
        guard.check(os.environ)
        resume = values["resume"]
        folder, earlier = (None, {}) if resume is None else earlier_run(resume, "simulate")
        name, app_folder, server, client = _components(app)
        check_same_app(earlier, name, app_folder, resume)
        values |= _with_earlier(values, earlier)
        run_config, seed, deterministic = values["run_config"], values["seed"], values["deterministic"]
        if app_folder is not None:
            run_config = FlowerApp.load(app_folder).simulated(run_config, count)
        clients = Clients.of(values["clients"], count)
        values["clients"] = plain(values["clients"])
        values["trackers"] = _checked_trackers(values["trackers"], folder, values["log_dir"])
        env: dict[str, str] = dict(settings.worker.env)
        server_env: dict[str, str] = {}
        if deterministic:
            determinism.check_interpreter()
            server_env = determinism.variables({**os.environ, **env}, earlier.get("threads", 1))
        if values["mps"]:
            _check_can_pack(deterministic, values["ray_address"])
        run_id = determinism.run_id(seed) if deterministic else secrets.randbits(63)
        nodes_with = partial(VirtualNodes, count, seed, run_id, run_config)
        clients = clients.with_app(overrides_of_app(client, nodes_with(), calls), calls)
        client_settings = [settings_of(settings, overrides) for overrides in clients.resources()]
        if not values["mps"] and any(client.gpu.compute is not None for client in client_settings):
            raise ConfigError(
                "gpu_compute (--gpu-compute, in the table of clients, or in a gpu_mod of the app) has "
                "an effect with mps (--mps) only. Add that, or remove it"
            )
        work = Work(
            name,
            client,
            settings.derived(
                {"context": None, "env": {**env, **server_env}}, run_config=run_config, named=flag
            ),
            nodes_with(clients),
            values["max_workers"],
            # In a deterministic run, no client may see changes that another client made to modules.
            values["calls_per_worker"] or (1 if deterministic else MANY),
            deterministic,
            is_strict=deterministic and not values["keep_going"],
            mps=values["mps"],
        )
        return cls(
            work, server, app_folder, server_env, folder, earlier, cast(SimulationOptions, values), calls
        )

    def identity(self, hosts: Hosts) -> dict[str, Any]:
        """Return the values that a resumed run must share with the earlier one."""
        work = self.work
        identity = {"app": work.name, "num_supernodes": len(work.nodes.ids), "seed": work.nodes.seed}
        availability = [
            [pattern, entry["availability"]]
            for pattern, entry in (self.options["clients"] or {}).items()
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
            "order": self.options["order"],
            "state_memory_bytes": self.options["state_memory"],
            "clients_table": self.options["clients"],
            "options": {option: _recorded(option, value) for option, value in self.calls.items()},
            "cores": cores(),
            **hosts.info.described,
        }


def _values(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of all options of a simulation: the given ones, checked, or the defaults."""
    for name in given:
        if name not in OPTIONS:
            raise TypeError(f"no option {name!r}; there are {', '.join((*OPTIONS, *CALL))}")
    values = {name: option.resolve(given.get(name)) for name, option in OPTIONS.items()}
    run_config = values["run_config"]
    if run_config is not None and not isinstance(run_config, Mapping):
        raise TypeError(f"run_config must be a mapping of keys to values, not a {type(run_config).__name__}")
    # None means no folder, and not the default.
    return values if given.get("log_dir", "") is not None else {**values, "log_dir": None}


def _with_earlier(values: Mapping[str, Any], earlier: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that a run has from an earlier run, unless they are given."""
    run_config = with_rounds(values["run_config"] or {}, values["rounds"], "rounds", "run_config")
    seed, table = values["seed"], values["clients"]
    return {
        "run_config": {**earlier.get("run_config", {}), **run_config},
        "seed": earlier.get("seed", secrets.randbelow(_SEEDS)) if seed is None else seed,
        "clients": earlier.get("clients_table", {}) if table is None else table,
        "deterministic": values["deterministic"] or bool(earlier.get("deterministic")),
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
    if not isinstance(app, str | os.PathLike):
        raise TypeError(f"an app is a folder, or a ServerApp and a ClientApp, not a {type(app).__name__}")
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
