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
from flower_gpu.calls.settings import call_settings, checked_environment
from flower_gpu.cli.arguments import Command, given_calls, is_quiet
from flower_gpu.errors import ConfigError, DiskError, GPUUnavailableError, RunEndedError, shortened
from flower_gpu.kinds import FOLDER, PAIRS
from flower_gpu.options import (
    GPU_CAP,
    GPU_GUARD,
    TRACKER,
    CallOptions,
    Option,
    options_of,
)
from flower_gpu.printable import path_text, told_if_slow
from flower_gpu.simulation.determinism import FIXED, HASH_SEED, has_fixed_hashes
from flower_gpu.simulation.options import OPTIONS, ClientOutputWord
from flower_gpu.workers.call import check_modules, checked_preload
from flower_gpu.workers.interrupts import ended_by_signals
from flower_gpu.workers.own_process import facts

_INTERRUPTED: Final = 128 + signal.SIGINT
_MODULES: Final = ("flower_gpu.simulation.run", "flower_gpu.simulation.reporting")
# What the run itself is given; the others are the command's own.
_OF_THE_RUN: Final = tuple(
    name for name in OPTIONS if name not in ("num_supernodes", "rounds", "progress", "client_output")
)
_TABLE: Final = {
    **OPTIONS,
    "run_config": Option(
        "keys of the app's run config (TOML values), or a TOML file; may be repeated",
        PAIRS,
        group="federation",
        synonyms=("c",),
    ),
    "clients_table": Option(
        "TOML file of what single clients have of their own, by partition, such as slow-down (see the "
        "reference)",
        replace(FOLDER, metavar="FILE.toml"),
        group="federation",
    ),
    "preload": Option(
        "function that loads data, called once with these arguments: all workers share the data that it "
        "keeps in its module; may be repeated",
        replace(PAIRS, metavar="'MODULE:FUNCTION K=V ...'"),
        group="workers",
    ),
    "gpu_guard": GPU_GUARD,
    "gpu_cap": GPU_CAP,
    **options_of("simulate"),
    "tracker": TRACKER,
}


def begin_command(arguments: argparse.Namespace) -> None:
    """Note that this process is there for this command only: the run may be in a fork of the fork server.

    A deterministic run needs fixed hashes of texts, which are chosen when Python starts: this process is
    replaced by one that has them. Where an option of Python is against it, the run itself says so.
    """
    arguments.may_fork = arguments.ray_address is None and not facts.is_program
    if not (arguments.deterministic or _earlier_settings(arguments.resume).get("deterministic")):
        return
    if has_fixed_hashes() or os.environ.get(HASH_SEED) == FIXED or sys.flags.ignore_environment:
        return
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, HASH_SEED: FIXED})


def _earlier_settings(folder: Path | None) -> Mapping[str, Any]:
    """Return the settings of an earlier run; nothing where they cannot be read, which is an error later."""
    return {} if folder is None else RunFolder(folder).settings() or {}


def run(arguments: argparse.Namespace) -> int:
    """Run the simulation; return the exit status.

    Raises ConfigError if an option cannot be used; then nothing was started or written. Only ``--preload``
    has to be tried.
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
    return _run_here(
        app.path,
        num_supernodes,
        shown,
        run_config=run_config,
        progress=shown.has_bars,
        client_output=shown.client_output,
        trackers=list(chain(*arguments.tracker)) or None,
        preload=preload,
        clients=clients,
        **{name: getattr(arguments, name) for name in _OF_THE_RUN},
        **calls,
    )


def _call_options(arguments: argparse.Namespace) -> CallOptions:
    """Return the options of calls. They hold for the server's own calls as well, whatever the variables were.

    But for ``--timeout-s``: it is for clients.
    """
    calls = given_calls(arguments)
    env = checked_environment(
        {name: value for name, value in calls.items() if name != "timeout_s"}, os.environ
    )
    if arguments.gpu_guard is not None:
        env[GPU_GUARD.variable] = arguments.gpu_guard
    if arguments.gpu_cap is not None:
        env[GPU_CAP.variable] = arguments.gpu_cap
    for name in os.environ.keys() - env.keys():
        del os.environ[name]
    os.environ.update(env)
    return calls


def _federation(arguments: argparse.Namespace) -> tuple[int, dict[str, ConfigValue]]:
    """Return the number of nodes, by default that of the run that goes on, and the values of a run config."""
    given = given_run_config(arguments.run_config)
    given = with_rounds(given, arguments.rounds, "--rounds", "--run-config")
    if arguments.resume is None:
        if arguments.num_supernodes is None:
            raise ConfigError(
                "--num-supernodes N (or --clients N) is missing: how many virtual clients are there?"
            )
        return arguments.num_supernodes, given
    _, before = earlier_run(arguments.resume, "simulate")
    return arguments.num_supernodes or before["num_supernodes"], given


def given_run_config(texts: Sequence[str]) -> dict[str, ConfigValue]:
    """Read ``--run-config``: pairs, or the name of a TOML file, as ``flwr run`` takes them.

    Raises ConfigError if that is neither.
    """
    values: dict[str, ConfigValue] = {}
    for text in texts:
        if text.endswith(".toml") and "=" not in text:
            values.update(flatten(_toml("--run-config", Path(text).expanduser())))
        else:
            values.update(parse_pairs("--run-config", [text]))
    return values


def _toml(option: str, path: Path) -> dict[str, Any]:
    """Read the TOML file that was given for an option; ConfigError if it is none."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))  # editors on Windows add a byte order mark
    except OSError as error:
        raise ConfigError(f"{option} {path_text(path)}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{option} {path_text(path)}: {error}") from None


def given_preload(texts: Sequence[str], app: Path) -> list[tuple[str, dict[str, ConfigValue]]]:
    """Read ``--preload``: functions, each with its arguments.

    Raises ConfigError if one is not of the form ``package.module:function key=value ...``, or its module is
    neither in the app's folder nor installed.
    """
    found: list[tuple[str, dict[str, ConfigValue]]] = []
    for text in texts:
        name, _, pairs = text.strip().partition(" ")
        arguments = parse_pairs("--preload", [pairs]) if pairs.strip() else {}
        try:
            functions = checked_preload((name, arguments))
            check_modules(functions, [str(app)])
            found += functions
        except ConfigError as error:
            raise ConfigError(f"--preload: {error}") from None
    return found


@dataclass(frozen=True)
class _Shown:
    """What the command tells of a run."""

    progress: bool  # unless --no-progress
    is_quiet: bool  # --quiet
    chosen_output: ClientOutputWord  # --client-output

    @property
    def client_output(self) -> ClientOutputWord:
        """The lines of clients that are shown: by default none with --quiet."""
        return "file" if self.is_quiet and self.chosen_output == "auto" else self.chosen_output

    @property
    def has_bars(self) -> bool:
        """Whether the run itself shows its progress, with the summary below it."""
        return self.progress and not self.is_quiet

    def say(self, text: str) -> None:
        """Show a line before there are bars."""
        if self.has_bars:
            _say(text)


def _run_here(app: Path, num_supernodes: int, shown: _Shown, **options: Any) -> int:
    # Here: what they import takes a second, and an error in an option is there at once.
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
        is_told = isinstance(error, ConfigError | DiskError | GPUUnavailableError)  # their text says it all
        if not is_told and not isinstance(error, RunEndedError):
            print(shortened(traceback.format_exc()), end="", file=sys.stderr)
        folder = vars(error).get(FOLDER)
        has_no_summary = shown.progress and shown.is_quiet  # otherwise it has named the command
        if folder is not None and has_no_summary and not isinstance(error, DiskError):
            _say(f"report: flower-gpu report {short(folder)}")
        if is_told:
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
    """Have this command done by a fork of the fork server, which imports for the run and for its workers.

    Returns what waits for it. None where there is no such server for workers either.
    """
    # Here: they import cloudpickle, and the command's help needs no package.
    from flower_gpu.simulation.workers import Needs
    from flower_gpu.workers import methods
    from flower_gpu.workers.forkserver import proxy

    if not methods.choose(call_settings({}).worker.start_method).from_server:
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
            "interrupted; to go on after the last finished round, add this to the same command: "
            f"--resume {short(path)}"
        )
    return f"interrupted; its results are in {short(path)}, and there is no checkpoint to go on from"


def _once_mended(path: Path | None, can_resume: bool) -> str:
    more = "--keep-going lets such a run go on"
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

Metrics, the final model and the result are left in a folder under --log-dir.""",
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
