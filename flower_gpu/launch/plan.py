"""The plan of a run. It is made from the options, and checked against the app and this host."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, TypeGuard

from flower_gpu import options as call_options
from flower_gpu.apps.app import NUM_CLIENTS_KEY, NUM_ROUNDS_KEY, ConfigValue, FlowerApp
from flower_gpu.apps.app_imports import mentions
from flower_gpu.apps.dependencies import missing_packages_note
from flower_gpu.apps.folder import (
    RunFolder,
    check_log_dir,
    check_rounds_left,
    check_same_app,
    earlier_run,
)
from flower_gpu.calls.grants import guard
from flower_gpu.errors import ConfigError, GPUUnavailableError, LeaseError
from flower_gpu.launch import gpu_check
from flower_gpu.launch.options import (
    CLIENTS_PER_ROUND_KEY,
    RUN_CONFIG,
    LaunchOptions,
    check_node_config,
    node_config_of,
)
from flower_gpu.options import flag
from flower_gpu.printable import path_text
from flower_gpu.programs.commands import with_flowers
from flower_gpu.workers.forkserver import client as forkserver

DEFAULT_CLIENTS: Final = 2
#: Flower's variable. With "1", Flower does not install the dependencies of apps.
NOT_INSTALLED: Final = "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"
_NODE_KEYS: Final = ("partition-id", "num-partitions")
# Names of flower_gpu with which a ClientApp requests leases itself, with its own options.
_LEASE_TAKERS: Final = ("gpu_mod", "gpu_client", "GPUClient", "run_in_worker")


@dataclass(frozen=True)
class Plan:
    """A run that can be started: the options, completed for its app and this host."""

    options: LaunchOptions
    app: FlowerApp
    clients: int
    overrides: Mapping[str, ConfigValue]  # values of the run config that the launcher passes
    fast_start: bool  # whether SuperNodes start our flwr-clientapp
    gives_leases: bool = False  # whether each message gets a lease before the app's code runs
    remarks: tuple[str, ...] = ()  # notes for the user before the start
    policies: frozenset[str] = frozenset()  # device policies of clients and server, such as "require"
    folder: RunFolder | None = None  # folder of the run to resume

    @property
    def run_config(self) -> dict[str, ConfigValue]:
        """The run config that the app will get."""
        return {**self.app.run_config, **self.overrides}

    @property
    def num_rounds(self) -> int | None:
        """Number of rounds, or None if the app does not declare it under the usual name."""
        value = self.run_config.get(NUM_ROUNDS_KEY)
        return value if _is_whole(value) else None

    @property
    def clients_at_once(self) -> int:
        """Number of clients that may train at the same time."""
        value = self.run_config.get(CLIENTS_PER_ROUND_KEY)
        return value if _is_whole(value) and value >= 1 else self.clients

    def node_config_of(self, client: int) -> dict[str, ConfigValue]:
        """Return the config of a client's node."""
        return {
            "partition-id": client,
            "num-partitions": self.clients,
            **self.options.node_config,
            **node_config_of(self.options.calls, client),
        }


def make_plan(options: LaunchOptions) -> Plan:
    """Return the plan of a run, checked against the app and this host. Starts and writes nothing.

    Raises ConfigError if the run cannot be started.
    """
    app = FlowerApp.load(options.app_dir)
    folder: RunFolder | None = None
    if options.resume is not None:
        folder, settings = earlier_run(options.resume, "launch")
        check_same_app(settings, app.name, app.path, options.resume)
        options = _with_earlier(options, app, settings)
    declared = app.run_config.get(NUM_CLIENTS_KEY)
    clients = options.clients or (declared if _is_whole(declared) and declared >= 1 else DEFAULT_CLIENTS)
    overrides = _overrides(options, app, clients)
    run_config = {**app.run_config, **overrides}
    per_round = run_config.get(CLIENTS_PER_ROUND_KEY)
    if _is_whole(per_round) and per_round > clients:
        where = "" if CLIENTS_PER_ROUND_KEY in overrides else f" (the default of {app.name})"
        raise ConfigError(f"--clients-per-round {per_round}{where} is more than --clients {clients}")
    partition = run_config.get("partition")
    if "dirichlet-alpha" in options.run_config_options and partition not in (None, "dirichlet"):
        raise ConfigError(f"--dirichlet-alpha needs --partition dirichlet, not {partition}")
    for key in _NODE_KEYS:
        if key in options.node_config:
            raise ConfigError(f"--node-config {key} cannot be given: the launcher sets it for each client")
    check_node_config(options.calls, options.node_config)
    _check_commands()
    fast_start = options.fast_start and forkserver.is_supported()
    if folder is None:
        check_log_dir(options.log_dir)
    else:
        # Imported late, because these modules import Flower.
        from flower_gpu.strategies.resuming.checkpoint import Checkpoints
        from flower_gpu.strategies.resuming.states import StateStore

        # Read here, so that a damaged checkpoint is an error before any process has started.
        finished = Checkpoints(folder.checkpoint, StateStore()).read()
        num_rounds = run_config.get(NUM_ROUNDS_KEY)
        if finished is not None and _is_whole(num_rounds):
            check_rounds_left(finished.server_round, num_rounds)
    takes_leases = mentions(app.path, app.clientapp.partition(":")[0], _LEASE_TAKERS)
    remarks = () if fast_start or takes_leases else (_without_leases(app, options),)
    gives_leases = fast_start and not takes_leases
    return _checked_on_gpus(
        Plan(options, app, clients, overrides, fast_start, gives_leases, remarks, folder=folder)
    )


def _without_leases(app: FlowerApp, options: LaunchOptions) -> str:
    why = "this platform has no fork server" if options.fast_start else "--no-fast-start"
    return (
        f"note: the clients of {app.name} have no leases and run in Flower's own processes ({why}). For "
        "leases write ClientApp(mods=[gpu_mod]) in the app"
    )


def _with_earlier(options: LaunchOptions, app: FlowerApp, earlier: Mapping[str, Any]) -> LaunchOptions:
    """Return the options, completed with the clients, node config and run config of an earlier run."""
    clients = len(earlier["node_configs"])
    if options.clients not in (None, clients):
        raise ConfigError(
            f"--clients {options.clients}: the run in {path_text(str(options.resume))} has {clients}, and "
            "continues with them. Leave --clients out, or start a new run without --resume"
        )
    run_config = {
        key: value
        for key, value in earlier.get("run_config", {}).items()
        if key in app.run_config and key not in (*options.run_config_options, NUM_CLIENTS_KEY)
    }
    return replace(
        options,
        clients=clients,
        run_config={**run_config, **options.run_config},
        node_config={**earlier.get("node_config", {}), **options.node_config},
    )


def _check_commands() -> None:
    path = with_flowers(os.environ.get("PATH"))
    for name in ("flower-superlink", "flower-supernode", "flwr"):
        if shutil.which(name, path=path) is None:
            raise ConfigError(f"{name} is not installed for {sys.executable}: pip install flwr")


def _checked_on_gpus(plan: Plan) -> Plan:
    """Return the plan with notes about this host's GPUs. Raises ConfigError if they cannot serve it."""
    calls, run_config = plan.options.calls, plan.run_config
    env = call_options.environment(calls, os.environ)
    node_configs = {f"client {client}": plan.node_config_of(client) for client in range(plan.clients)}
    try:
        callers = gpu_check.callers_of({**node_configs, "the server": {}}, run_config, calls, env)
        is_given = call_options.USE_GPU.run_config_key in plan.overrides
        remarks = gpu_check.check(callers, calls, env, is_given=is_given, concurrency=plan.clients_at_once)
    except (GPUUnavailableError, LeaseError) as error:
        raise ConfigError(str(error)) from error
    if guarded := (guard.describe if plan.gives_leases else guard.outside_of_workers)(os.environ):
        remarks.append(guarded)
    # With "0", Flower installs the dependencies of each app.
    if os.environ.get(NOT_INSTALLED) != "0" and (text := missing_packages_note(plan.app)):
        remarks.append(f"note: {text}")
    return replace(
        plan,
        remarks=(*plan.remarks, *remarks),
        policies=frozenset(group.settings.policy.gpu for group in callers),
    )


def _overrides(options: LaunchOptions, app: FlowerApp, clients: int) -> dict[str, ConfigValue]:
    flags = {option.run_config_key: flag(name) for name, option in RUN_CONFIG.items()}
    hints = {option.run_config_key: option.hint for option in RUN_CONFIG.values()}
    for key in options.run_config:
        if key in options.run_config_options:
            raise ConfigError(
                f"{flags[key]} and --run-config {key} give the same setting twice: leave one out"
            )

    def written(key: str) -> str:
        return flags[key] if key in options.run_config_options else f"--run-config {key}"

    values = {**options.run_config_options, **options.run_config}
    return app.overrides(values, clients, written, lambda key: hints.get(key, ""))


def _is_whole(value: ConfigValue | None) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)
