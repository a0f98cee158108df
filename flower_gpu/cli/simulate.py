"""``flower-gpu simulate``: a Flower app with many virtual clients on this machine."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tomllib
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Final

from flower_gpu.apps.app import ConfigValue, FlowerApp, flatten, parse_pairs, with_rounds
from flower_gpu.apps.app_imports import libraries_of
from flower_gpu.apps.folder import RunFolder, check_log_dir, earlier_run, short
from flower_gpu.calls.settings import checked_environment
from flower_gpu.cli.arguments import Command, given_calls, given_limits, is_quiet
from flower_gpu.errors import ConfigError, DiskError, GPUUnavailableError, RunEndedError, shortened
from flower_gpu.kinds import FOLDER, PAIRS
from flower_gpu.options import CALL, LIMITS, TRACKER, CallOptions, Option, options_of
from flower_gpu.printable import path_text, told_if_slow
from flower_gpu.simulation.determinism import FIXED, HASH_SEED, has_fixed_hashes
from flower_gpu.simulation.options import NUM_SUPERNODES, OPTIONS, ClientOutputWord
from flower_gpu.workers.call import check_modules, checked_preload
from flower_gpu.workers.interrupts import ended_by_signals
from flower_gpu.workers.own_process import facts

_INTERRUPTED: Final = 128 + signal.SIGINT
_MODULES: Final = ("flower_gpu.simulation.run", "flower_gpu.simulation.reporting")
# The options with a kind have a flag of the same name.
_OF_THE_RUN: Final = {name: option for name, option in OPTIONS.items() if option.kind is not None}
_TABLE: Final = {
    "num_supernodes": NUM_SUPERNODES,
    **_OF_THE_RUN,
    "run_config": Option(
        "keys of the app's run config (TOML values), or a TOML file; may be repeated",
        PAIRS,
        group="federation",
        synonyms=("c",),
    ),
    "clients_table": Option(
        "TOML file with settings of single clients by partition, such as slow-down (see the reference)",
        replace(FOLDER, metavar="FILE.toml"),
        group="federation",
    ),
    "preload": Option(
        "function that loads data, called once with these arguments: all workers share the data that it "
        "keeps in its module; may be repeated",
        replace(PAIRS, metavar="'MODULE:FUNCTION K=V ...'"),
        group="workers",
    ),
    **LIMITS,
    **options_of("simulate"),
    "tracker": TRACKER,
}


def begin_command(arguments: argparse.Namespace) -> None:
    """Prepare a process that runs only this command, so the run may be in a fork of the fork server.

    A deterministic run needs fixed hashes of strings, which Python chooses at its start. So this process is
    replaced by a process with fixed hashes. If an option of Python prevents that, the run reports it.
    """
    arguments.may_fork = arguments.ray_address is None and not facts.is_program
    if not (arguments.deterministic or _earlier_settings(arguments.resume).get("deterministic")):
        return
    if has_fixed_hashes() or os.environ.get(HASH_SEED) == FIXED or sys.flags.ignore_environment:
        return
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, HASH_SEED: FIXED})


def _earlier_settings(folder: Path | None) -> Mapping[str, Any]:
    """Return the settings of an earlier run. Unreadable settings are empty here, and an error later."""
    return {} if folder is None else RunFolder(folder).settings() or {}


def run(arguments: argparse.Namespace) -> int:
    """Run the simulation, and return the exit status.

    Raises ConfigError if an option cannot be used. Nothing has been started or written then, except for
    ``--preload``, which can only be checked by calling its functions.
    """
    with ended_by_signals() as received:
        try:
            status = _simulate(arguments)
        except KeyboardInterrupt:
            status = _INTERRUPTED
    return 128 + received[0] if received and status == _INTERRUPTED else status


def _simulate(arguments: argparse.Namespace) -> int:
    calls = _call_options(arguments)
    app = FlowerApp.load(arguments.app_dir)
    num_supernodes, run_config = _federation(arguments)
    app.overrides(run_config, num_supernodes)
    preload = given_preload(arguments.preload, app.path)
    table = arguments.clients_table
    clients = None if table is None else _toml("--clients-table", table)
    if arguments.resume is None:
        check_log_dir(arguments.log_dir)
    shown = _Shown(arguments.progress, is_quiet(arguments), arguments.client_output)
    if getattr(arguments, "may_fork", False):
        with told_if_slow(shown.say, f"importing what {app.name} needs"):
            wait = _forked(app)
        if wait is not None:
            return wait()
    options: dict[str, Any] = {name: getattr(arguments, name) for name in _OF_THE_RUN}
    options |= {
        "rounds": None,  # in the run config already
        "run_config": run_config,
        "progress": shown.has_bars,
        "client_output": shown.client_output,
        "trackers": list(chain(*arguments.tracker)) or None,
        "preload": preload,
        "clients": clients,
        **calls,
    }
    return _run_here(app.path, num_supernodes, shown, options)


def _call_options(arguments: argparse.Namespace) -> CallOptions:
    """Return the options of calls, and set their environment variables for the server's own calls.

    ``--timeout-s`` is not set, because it is for clients only.
    """
    calls = given_calls(arguments)
    env = checked_environment(
        {name: value for name, value in calls.items() if name != "timeout_s"}, os.environ
    )
    env.update(given_limits(arguments))
    for name in os.environ.keys() - env.keys():
        del os.environ[name]
    os.environ.update(env)
    return calls


def _federation(arguments: argparse.Namespace) -> tuple[int, dict[str, ConfigValue]]:
    """Return the number of nodes and the given run config. A resumed run keeps its number by default."""
    run_config = given_run_config(arguments.run_config)
    run_config = with_rounds(run_config, arguments.rounds, "--rounds", "--run-config")
    if arguments.resume is None:
        if arguments.num_supernodes is None:
            raise ConfigError(
                "--num-supernodes N (or --clients N) is missing: how many virtual clients are there?"
            )
        return arguments.num_supernodes, run_config
    _, settings = earlier_run(arguments.resume, "simulate")
    return arguments.num_supernodes or settings["num_supernodes"], run_config


def given_run_config(texts: Sequence[str]) -> dict[str, ConfigValue]:
    """Return the values of ``--run-config``. As in ``flwr run``, a text is pairs or the name of a TOML file.

    Raises ConfigError if a text is neither.
    """
    values: dict[str, ConfigValue] = {}
    for text in texts:
        if text.endswith(".toml") and "=" not in text:
            values.update(flatten(_toml("--run-config", Path(text).expanduser())))
        else:
            values.update(parse_pairs("--run-config", [text]))
    return values


def _toml(option: str, path: Path) -> dict[str, Any]:
    """Return the content of an option's TOML file. Raises ConfigError if it cannot be read."""
    try:
        # Editors on Windows may add a byte order mark.
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"{option} {path_text(path)}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{option} {path_text(path)}: {error}") from None


def given_preload(texts: Sequence[str], app: Path) -> list[tuple[str, dict[str, ConfigValue]]]:
    """Return the functions of ``--preload``, each with its arguments.

    Raises ConfigError if a text does not have the form ``package.module:function key=value ...``, or if its
    module is neither in the app's folder nor installed.
    """
    preload: list[tuple[str, dict[str, ConfigValue]]] = []
    for text in texts:
        name, _, pairs = text.strip().partition(" ")
        arguments = parse_pairs("--preload", [pairs]) if pairs.strip() else {}
        try:
            functions = checked_preload((name, arguments))
            check_modules(functions, [str(app)])
            preload += functions
        except ConfigError as error:
            raise ConfigError(f"--preload: {error}") from None
    return preload


@dataclass(frozen=True)
class _Shown:
    """Settings for the output of a run."""

    progress: bool  # False with --no-progress
    is_quiet: bool  # True with --quiet
    chosen_output: ClientOutputWord  # value of --client-output

    @property
    def client_output(self) -> ClientOutputWord:
        """Value of ``--client-output``. By default, --quiet hides the output of clients."""
        return "file" if self.is_quiet and self.chosen_output == "auto" else self.chosen_output

    @property
    def has_bars(self) -> bool:
        """True if the run shows its progress, and a summary at the end."""
        return self.progress and not self.is_quiet

    def say(self, text: str) -> None:
        """Show a line before the progress bars."""
        if self.has_bars:
            _say(text)


def _run_here(app: Path, num_supernodes: int, shown: _Shown, options: Mapping[str, Any]) -> int:
    # Imported late, because these imports take a second, and an error in an option should be shown at once.
    with told_if_slow(shown.say, "importing Flower"):
        from flower_gpu.simulation.reporting import FOLDER, error_text, lines_of
        from flower_gpu.simulation.run import simulate
        from flower_gpu.simulation.simulation_result import SimulationStoppedError

    try:
        result = simulate(app, num_supernodes, **options)
    except SimulationStoppedError as stopped:
        _say(_how_to_go_on(stopped.folder, stopped.can_resume))
        return _INTERRUPTED
    except Exception as error:
        # The texts of these errors are enough without a traceback.
        is_explained = isinstance(error, ConfigError | DiskError | GPUUnavailableError)
        if not is_explained and not isinstance(error, RunEndedError):
            print(shortened(traceback.format_exc()), end="", file=sys.stderr)
        folder = vars(error).get(FOLDER)
        has_no_summary = shown.progress and shown.is_quiet  # A summary would have named the command.
        if folder is not None and has_no_summary and not isinstance(error, DiskError):
            _say(f"report: flower-gpu report {short(folder)}")
        if is_explained:
            raise
        if isinstance(error, RunEndedError):
            _say(str(error))
            _say(_once_mended(error.folder, error.can_resume))
        else:
            _say(f"{error_text(error)} (the traceback is above)")
        return 1
    if shown.progress and shown.is_quiet:
        run_folder = None if result.folder is None else RunFolder(result.folder)
        print("\n".join(lines_of(result.summary, run_folder)), file=sys.stderr, flush=True)
    return 0


def _forked(app: FlowerApp) -> Callable[[], int] | None:
    """Run this command in a fork of the fork server, which imports the libraries of the run and its workers.

    Returns a function that waits for the fork, or None if workers do not use the fork server.
    """
    # Imported late, because these modules import cloudpickle, and --help must work without packages.
    from flower_gpu.simulation.workers import Needs
    from flower_gpu.workers import methods
    from flower_gpu.workers.forkserver import proxy

    if not methods.choose(CALL["start_method"].resolve(None, os.environ)).from_server:
        return None
    needs = Needs.of(libraries_of(app.path, app.clientapp.partition(":")[0]))
    libraries = libraries_of(app.path, app.serverapp.partition(":")[0])
    modules = dict.fromkeys([*_MODULES, *libraries, *needs.modules])
    return proxy.fork("flower_gpu.cli.main:main", f"simulate {app.name}", list(modules), needs.without)


def _how_to_go_on(path: Path | None, can_resume: bool) -> str:
    if path is None:
        return "interrupted"
    if can_resume:
        return (
            "interrupted; to continue after the last finished round, add this to the same command: "
            f"--resume {short(path)}"
        )
    return f"interrupted; its results are in {short(path)}, and there is no checkpoint to continue from"


def _once_mended(path: Path | None, can_resume: bool) -> str:
    more = "--keep-going lets such a run continue"
    if path is None:
        return more
    more = f"all failures are in {short(RunFolder(path).failures)}; {more}"
    if can_resume:
        more += f"; after you have fixed the cause, continue with the same command and --resume {short(path)}"
    return more


def _say(text: str) -> None:
    print(f"flower-gpu simulate: {text}", file=sys.stderr, flush=True)


COMMAND: Final = Command(
    "run a Flower app with up to thousands of virtual clients on this machine",
    """\
Run a Flower app in a simulation: its ServerApp in one process, and each message to one of its virtual
clients in a worker process with a lease. How many run at a time follows from leases, cores and memory.

    flower-gpu simulate my-app --clients 1000 --rounds 5

Metrics, the final model and the result are written to a folder under --log-dir.""",
    run,
    _TABLE,
    {"GPUs": "Which GPUs messages may use, and how much each leases there. As many run at a time as fit."},
    {
        "gpu": "; it holds for every client and for the server's own calls",
        "gpu_ids": ": all of the clients may use them (default: every GPU)",
        "timeout_s": "; then the client is dropped",
    },
    takes_app=True,
    outlives_output=True,
)
