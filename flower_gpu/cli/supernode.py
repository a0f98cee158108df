"""``flower-gpu supernode``: SuperNodes that run each message under a lease, with any app.

Without ``--count``, this process becomes Flower's SuperNode. With ``--count N``, it starts N SuperNodes, each
with its own log and port, and restarts SuperNodes that exit. We change only the environment of a SuperNode:
our ``flwr-clientapp`` comes first on its ``PATH``.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

from flower_gpu import frameworks
from flower_gpu.apps.app import ConfigValue, parse_pairs
from flower_gpu.apps.folder import RunFolder
from flower_gpu.calls.grants import guard
from flower_gpu.calls.settings import checked_environment, command_settings
from flower_gpu.cli import confine
from flower_gpu.cli.arguments import Command, given_calls, given_limits, is_quiet
from flower_gpu.errors import ConfigError
from flower_gpu.kinds import COUNT, FOLDER
from flower_gpu.launch import ports, supernodes
from flower_gpu.launch.options import check_node_config, node_config_of
from flower_gpu.launch.supernode_log import COMMAND as FLOWERS
from flower_gpu.launch.supernode_log import Notices
from flower_gpu.launch.supernodes import SuperNode
from flower_gpu.options import CONCURRENCY, LIMITS, LOG_DIR, RUN_DIR_VARIABLE, Option, options_of
from flower_gpu.printable import printable

_NODE_CONFIG: Final = supernodes.NODE_CONFIG
_KEYS: Final = (supernodes.KEY, "--ssl-keyfile")


def run(arguments: argparse.Namespace) -> int:
    """Become the SuperNode, or run several SuperNodes until the user stops them."""
    if arguments.count is not None:
        return _run_several(arguments)
    if arguments.log_dir is not None:
        raise ConfigError("--log-dir needs --count: without it the SuperNode writes its log to this terminal")
    # Imported late, so that --help works without the dependencies of workers.
    from flower_gpu.programs import commands, superlink

    env = environment(arguments, os.environ)
    _check_required([_node_config(arguments)], env)
    _check_port(arguments.flower)
    address = superlink.address_of(arguments.flower)
    _tell(arguments, [*_limits(arguments, env), f"connecting to the SuperLink at {printable(address)}"])
    commands.warm_up_in_background(env)
    superlink.wait_until_it_listens(address, _print)
    os.execvpe(FLOWERS, [FLOWERS, *arguments.flower], env)


def _run_several(arguments: argparse.Namespace) -> int:
    from flower_gpu.programs import superlink

    count = arguments.count
    given, _ = without_option(arguments.flower, _NODE_CONFIG)
    if without_option(given, "--port")[1]:
        raise ConfigError(
            "--port cannot be used with --count, since each SuperNode needs a port of its own: leave it out, "
            "and they get free ones"
        )
    has_key = bool(without_option(given, supernodes.KEY)[1])
    if has_key and count > 1:
        raise ConfigError(
            f"{supernodes.KEY} is the key of one SuperNode: with it, give --count 1, and start a command for "
            "each key"
        )
    calls = given_calls(arguments)
    env = environment(arguments, os.environ, count)
    pairs = _node_config(arguments)
    check_node_config(calls, pairs)
    _check_required([{**pairs, **node_config_of(calls, number)} for number in range(count)], env)
    logs = RunFolder.create(arguments.log_dir or LOG_DIR.default_value)
    env[RUN_DIR_VARIABLE] = str(logs.path)
    if not is_quiet(arguments):
        names = "1 SuperNode" if count == 1 else f"{count} SuperNodes"
        print(f"{names}; logs in {logs.shown}. Ctrl-C ends them", flush=True)
    address = superlink.address_of(given)
    limits = _limits(arguments, env)
    # The limits of apps are in each log, because users may read only the log of a SuperNode.
    for number in range(count):
        with logs.log(f"supernode-{number}").open("a") as log:
            log.writelines(f"{line}\n" for line in limits)
    _tell(arguments, [*limits, f"connecting to the SuperLink at {printable(address)}"])
    nodes = [
        SuperNode(number, count, given, pairs, calls, env, logs, has_key=has_key) for number in range(count)
    ]
    notices = Notices(count, _print, with_warnings=not is_quiet(arguments))
    return supernodes.run(
        nodes, env, logs, notices, partial(superlink.wait_until_it_listens, address, _print)
    )


def _check_port(flower: Sequence[str]) -> None:
    """Raise ConfigError if another process listens on the given port. Flower would exit with a traceback."""
    from flower_gpu.programs import superlink

    host, port = superlink.runtime_address_of(flower)
    if port is not None and ports.is_taken(host, port):
        raise ConfigError(
            f"--port {port}: another process listens on this port of {host}, such as another SuperNode. Give "
            "each SuperNode a port of its own with --port, or start several with --count"
        )


def _limits(arguments: argparse.Namespace, env: Mapping[str, str]) -> list[str]:
    """Return lines about the limits of apps on this host, and their gaps."""
    return [line for line in (guard.describe(env), *confine.describe(arguments)) if line]


def _tell(arguments: argparse.Namespace, lines: Sequence[str]) -> None:
    for line in () if is_quiet(arguments) else lines:
        _print(line)


def _print(line: str) -> None:
    print(line, flush=True)


def _key_files(arguments: argparse.Namespace) -> list[str]:
    """Return the files with keys of SuperNodes, which apps must not read."""
    return [path for option in _KEYS for path in without_option(arguments.flower, option)[1]]


def _node_config(arguments: argparse.Namespace) -> dict[str, ConfigValue]:
    """Return the given --node-config."""
    return parse_pairs(_NODE_CONFIG, without_option(arguments.flower, _NODE_CONFIG)[1])


def _check_required(configs: Sequence[Mapping[str, ConfigValue]], env: Mapping[str, str]) -> None:
    """Check the configs of nodes. Raises ConfigError if calls cannot use one of them on this host."""
    from flower_gpu.launch import gpu_check

    gpu_check.check_required([command_settings({}, env, config).gpu for config in configs], env)


def environment(arguments: argparse.Namespace, base: Mapping[str, str], nodes: int = 1) -> dict[str, str]:
    """Return the environment of SuperNodes with these options. ``nodes``: number of SuperNodes.

    Raises ConfigError if an option or variable cannot be used.
    """
    from flower_gpu.programs import commands, environments

    check(arguments.flower)
    env = checked_environment(given_calls(arguments), base)
    env.update(given_limits(arguments))
    guard.check(env)
    env.update(confine.environment(arguments, _key_files(arguments), env))
    if environments.OPTION in arguments.flower:
        environments.made_folder(env)
    # The workers of all SuperNodes share the cores, so each worker gets fewer threads.
    if nodes > 1 and not env.get(CONCURRENCY.variable):
        env[CONCURRENCY.variable] = str(nodes)
    # Flower's default of 1 s delays each message.
    env.setdefault("FLWR_SUPEREXEC_TASK_POLL_INTERVAL", "0.1")
    # With these variables, importing an app does not initialise CUDA.
    env = {**frameworks.UNTOUCHED_CUDA, **env}
    path = commands.with_flowers(env.get("PATH"))
    return commands.fast_start({**env, "PATH": path}, with_lease=True, nodes=nodes)


def check(flower: Sequence[str]) -> None:
    """Raise ConfigError if an option of Flower keeps SuperNodes from starting our processes."""
    _, isolation = without_option(flower, "--isolation")
    if "process" in isolation:
        raise ConfigError(
            "--isolation process cannot be used: another program would start the processes of messages, "
            "without a lease. Remove it; then flower-supernode starts them"
        )


def without_option(options: Sequence[str], name: str) -> tuple[list[str], list[str]]:
    """Return Flower's options without the option ``name``, and the values of that option.

    ``options``: names and values as on a command line.
    ``name``: name of an option, such as ``"--node-config"``. As in Flower, abbreviations also match.
    """
    rest: list[str] = []
    values: list[str] = []
    remaining = iter(options)
    for option in remaining:
        given, sign, value = option.partition("=")
        if len(given) <= 2 or not name.startswith(given):
            rest.append(option)
        elif sign:
            values.append(value)
        else:
            values.append(next(remaining, ""))
    return rest, values


def _add_flowers(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "flower", nargs="*", metavar="-- OPTIONS", help=f"options of {FLOWERS}, after two dashes"
    )


COMMAND: Final = Command(
    "run SuperNodes whose messages get leases, with any app",
    """\
Run Flower's SuperNode so that each message is handled in a worker that first gets a lease on a GPU, and is
held to it. Apps stay as they are, and cannot change it. Messages start in milliseconds, because workers are
forks of a process that has imported Flower and torch.

    flower-gpu supernode --gpu-memory 4GiB -- --insecure --superlink 127.0.0.1:8000 --port 9101 \\
        --node-config 'partition-id=0 num-partitions=2'

With --count N it runs N SuperNodes until Ctrl-C. They get ports of their own, and partition-id and
num-partitions in their node configs. A SuperNode that ends is started again.

    flower-gpu supernode --count 20 --gpu-ids 0,1 -- --insecure --superlink 127.0.0.1:8000""",
    run,
    {
        "count": Option("number of SuperNodes (default: one, which this process becomes)", COUNT),
        "log_dir": Option(
            f"with --count: where a folder with a log of each is made (default: {LOG_DIR.default})", FOLDER
        ),
        **options_of("supernode"),
        **confine.OPTIONS,
        **LIMITS,
    },
    {
        **confine.GROUPS,
        "GPUs": "Which GPUs messages may use, and how much each leases there. The app's code cannot change "
        "it.",
    },
    {
        "gpu_ids": ": with --count, the first node uses the first, and so on in turn (default: every "
        "GPU of the host)"
    },
    add=_add_flowers,
    after_dashes=FLOWERS,
    outlives_output=True,
)
