"""The options of ``flower-gpu launch``: what they are called, what they accept, what they stand for."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from flower_gpu.config import START_METHODS
from flower_gpu.errors import ConfigError
from flower_gpu.gpu.policy import SERVER_KEY
from flower_gpu.launch import gpu_options
from flower_gpu.launch.app import FlowerApp
from flower_gpu.launch.config_values import ConfigValue, parse_pairs
from flower_gpu.launch.gpu_options import GPUOptions
from flower_gpu.launch.option_types import (
    absolute_path,
    folder,
    non_negative_int,
    port_number,
    positive_float,
    positive_int,
    seconds,
    text_value,
    true_or_false,
)

DESCRIPTION: Final = """\
Run a Flower app on this machine: a server, N clients and the run, each with its own log file, all of them
stopped at the end. Nothing needs to be configured, and the user's Flower configuration is not touched."""

ENGINES: Final = MappingProxyType(
    {
        "superlink": "one SuperLink, N SuperNodes and `flwr run`",
        "start-client": "one start_server and N start_client processes; deprecated in Flower, but light",
    }
)


@dataclass(frozen=True)
class RunConfigOption:
    """An option that stands for a key of the app's run config.

    ``hint`` tells what an author can do whose app does not declare the key.
    """

    flag: str
    key: str
    type: Callable[[str], ConfigValue]
    metavar: str | None
    help: str
    choices: tuple[str, ...] | None = None
    hint: str = ""

    @property
    def dest(self) -> str:
        """Name of the parsed value."""
        return self.flag.removeprefix("--").replace("-", "_")


CLIENTS_PER_ROUND_KEY: Final = "clients-per-round"
NUM_ROUNDS_KEY: Final = "num-server-rounds"

RUN_CONFIG_OPTIONS: Final = (
    RunConfigOption(
        "--clients-per-round",
        CLIENTS_PER_ROUND_KEY,
        positive_int,
        "N",
        "clients that train in a round",
    ),
    RunConfigOption("--rounds", NUM_ROUNDS_KEY, positive_int, "N", "number of rounds"),
    RunConfigOption("--dataset", "dataset", text_value, "NAME", "data the app trains on"),
    RunConfigOption(
        "--data-dir", "data-dir", absolute_path, "DIR", "folder of the data, if it is there already"
    ),
    RunConfigOption(
        "--partition",
        "partition",
        text_value,
        None,
        "how the data is split between clients",
        choices=("iid", "dirichlet"),
    ),
    RunConfigOption(
        "--dirichlet-alpha",
        "dirichlet-alpha",
        positive_float,
        "X",
        "for --partition dirichlet: the smaller, the more the clients differ",
    ),
    RunConfigOption("--model", "model", text_value, "NAME", "model to train"),
    RunConfigOption("--batch-size", "batch-size", positive_int, "N", "batch size"),
    RunConfigOption("--local-epochs", "local-epochs", positive_int, "N", "epochs a client trains in a round"),
    RunConfigOption("--learning-rate", "learning-rate", positive_float, "X", "learning rate"),
    RunConfigOption("--seed", "seed", non_negative_int, "N", "seed of everything random"),
    RunConfigOption(
        "--use-gpu",
        SERVER_KEY,
        true_or_false,
        "true|false",
        "whether the run wants GPUs; nodes have the last word, see --gpu",
        hint=f"add `{SERVER_KEY} = true` to [tool.flwr.app.config] in its pyproject.toml, and "
        "context=context to its GPUClient",
    ),
)


@dataclass(frozen=True)
class LaunchOptions:
    """What the user asked for, each value checked on its own.

    Parameters
    ----------
    app_dir : Path
        Folder of the Flower app.
    engine : str
        A key of :data:`ENGINES`.
    clients : int, optional
        Number of clients; None: the app's own ``num-clients``, else 2.
    run_config_options : mapping
        Run config values given as options of their own, by key.
    run_config, node_config : mapping
        Values of ``--run-config`` and ``--node-config``, by key.
    start_method, timeout_s
        For every call in a worker; None leaves it to the environment and the app.
    gpu : GPUOptions
        What its calls want of the host's GPUs.
    fast_start : bool
        Whether the processes of messages are forks of one that has imported Flower and torch.
    log_dir : Path
        Where the run's folder is made.
    port : int, optional
        Port of the server; None: a free one.
    verbosity : int
        1 shows the server's log as well, -1 only the result, and errors.
    report : bool
        Whether a report is written at the end.
    keep_going : bool
        Whether a run in which every client fails goes on.
    """

    app_dir: Path
    engine: str = "superlink"
    clients: int | None = None
    run_config_options: Mapping[str, ConfigValue] = field(default_factory=dict)
    run_config: Mapping[str, ConfigValue] = field(default_factory=dict)
    node_config: Mapping[str, ConfigValue] = field(default_factory=dict)
    start_method: str | None = None
    timeout_s: float | None = None
    gpu: GPUOptions = field(default_factory=GPUOptions)
    fast_start: bool = True
    log_dir: Path = Path("runs")
    port: int | None = None
    verbosity: int = 0
    report: bool = True
    keep_going: bool = False


class _HelpWithAppDefaults(argparse.Action):
    """``--help``; after an app's folder it also shows what that app declares."""

    def __init__(self, option_strings: Sequence[str], dest: str, **_: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, help="show this help and exit")

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        app_dir = getattr(namespace, "app_dir", None)
        if app_dir is not None:
            try:
                app = FlowerApp.load(app_dir)
            except ConfigError as error:
                parser.error(str(error))
            lines = "\n".join(f"  {key} = {value!r}" for key, value in app.run_config.items())
            parser.epilog = f"run config of {app.name} and its defaults:\n{lines or '  (empty)'}"
        parser.print_help()
        parser.exit()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``launch`` to a parser."""
    add = parser.add_argument
    add("app_dir", metavar="APP_DIR", type=folder, help="folder of the Flower app")
    add("-h", "--help", action=_HelpWithAppDefaults)
    federation = parser.add_argument_group("federation")
    federation.add_argument(
        "--clients",
        metavar="N",
        type=positive_int,
        help="number of clients (default: the app's num-clients, else 2)",
    )
    federation.add_argument(
        "--engine",
        choices=tuple(ENGINES),
        default="superlink",
        help="; ".join(f"{name}: {text}" for name, text in ENGINES.items()) + " (default: superlink)",
    )
    federation.add_argument(
        "--node-config",
        metavar="'K=V ...'",
        action="append",
        default=[],
        help="further keys of every node's config (TOML values; may be repeated)",
    )
    app = parser.add_argument_group(
        "run config", "Passed on only when given; the app must declare the key, and sets the default."
    )
    for option in RUN_CONFIG_OPTIONS:
        app.add_argument(
            option.flag,
            metavar=option.metavar,
            type=option.type,
            choices=option.choices,
            help=f"{option.help} [{option.key}]",
        )
    app.add_argument(
        "--run-config",
        metavar="'K=V ...'",
        action="append",
        default=[],
        help="any keys of the app's run config (TOML values; may be repeated)",
    )
    workers = parser.add_argument_group(
        "workers",
        "A client gets its share of the cores (OMP_NUM_THREADS), unless that variable is set.",
    )
    workers.add_argument(
        "--start-method",
        choices=START_METHODS,
        help="how worker processes are started (default: auto)",
    )
    workers.add_argument(
        "--timeout-s",
        metavar="S",
        type=seconds,
        help="seconds a call in a worker may take, counted from its lease (default: no limit)",
    )
    workers.add_argument(
        "--no-fast-start",
        dest="fast_start",
        action="store_false",
        help="start Flower's own flwr-clientapp for each message, which imports everything anew",
    )
    workers.add_argument(
        "--keep-going",
        action="store_true",
        help="go on when every client failed in the first round, or in three rounds in a row (default: such "
        "a run ends with status 1)",
    )
    gpu_options.add_arguments(parser)
    output = parser.add_argument_group("output")
    output.add_argument(
        "--log-dir",
        metavar="DIR",
        type=folder,
        default=Path("runs"),
        help="where the run's folder is made (default: runs)",
    )
    output.add_argument(
        "--port",
        metavar="N",
        type=port_number,
        help="port of the server on 127.0.0.1 (default: a free one)",
    )
    output.add_argument("--no-report", dest="report", action="store_false", help="write no report at the end")


def from_arguments(arguments: argparse.Namespace) -> LaunchOptions:
    """Turn parsed arguments into options.

    Raises
    ------
    ConfigError
        If ``--run-config``, ``--node-config`` or ``--gpu-num`` cannot be read.
    """
    given = {
        option.key: value
        for option in RUN_CONFIG_OPTIONS
        if (value := getattr(arguments, option.dest)) is not None
    }
    return LaunchOptions(
        app_dir=arguments.app_dir,
        engine=arguments.engine,
        clients=arguments.clients,
        run_config_options=given,
        run_config=parse_pairs("--run-config", arguments.run_config),
        node_config=parse_pairs("--node-config", arguments.node_config),
        start_method=arguments.start_method,
        timeout_s=arguments.timeout_s,
        gpu=GPUOptions.from_arguments(arguments),
        fast_start=arguments.fast_start,
        log_dir=arguments.log_dir,
        port=arguments.port,
        verbosity=getattr(arguments, "verbosity", 0),
        report=arguments.report,
        keep_going=arguments.keep_going,
    )
