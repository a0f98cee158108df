"""``flower-gpu simulate``: a Flower app with many virtual clients on this machine."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tomllib
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from flower_gpu.commands.verbosity import is_quiet
from flower_gpu.errors import ClientsFailedError, ConfigError, GPUUnavailableError, shortened
from flower_gpu.gpu.request import memory_bytes
from flower_gpu.gpu.settings import GPUSettings
from flower_gpu.isolation.interrupts import ended_by_signals
from flower_gpu.isolation.preload import check_modules, checked
from flower_gpu.launch import gpu_options
from flower_gpu.launch.app import FlowerApp
from flower_gpu.launch.config_values import ConfigValue, flatten, parse_pairs
from flower_gpu.launch.folder import short
from flower_gpu.launch.gpu_options import GPUOptions
from flower_gpu.launch.option_types import folder, non_negative_int, positive_int, seconds, text_value
from flower_gpu.printable import path_text
from flower_gpu.run.failures import FILE_NAME

if TYPE_CHECKING:
    from flower_gpu.simulation.run import SimulationResult

HELP = "run a Flower app with up to thousands of virtual clients on this machine"
DESCRIPTION = """\
Run a Flower app in a simulation: its ServerApp in this process, and each message to one of its virtual
clients in a worker process with a lease. How many run at a time follows from leases, cores and memory.

    flower-gpu simulate my-app --num-supernodes 1000 --run-config "num-server-rounds=5"

Metrics, the final model and a summary are left in a folder under --log-dir."""

_TEXTS: Final = (
    "Which GPUs messages may use, and what each of them leases there: so many run at a time as fit.",
    "device policy of every client and of the server's own calls",
    "the GPUs that all of them may use (default: every one)",
)
_INTERRUPTED: Final = 128 + signal.SIGINT
_AUTO: Final = "auto"
_LOG_DIR: Final = Path("runs")
_STATE_MEMORY: Final = "1GiB"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    parser.add_argument("app_dir", metavar="APP_DIR", type=folder, help="folder of the Flower app")
    federation = parser.add_argument_group("federation")
    federation.add_argument(
        "--num-supernodes",
        metavar="N",
        type=positive_int,
        help="how many virtual clients (with --resume by default as many as before)",
    )
    federation.add_argument(
        "-c",
        "--run-config",
        metavar="'K=V ...'",
        action="append",
        default=[],
        help="keys of the app's run config (TOML values), or a TOML file; may be repeated",
    )
    federation.add_argument(
        "--seed",
        metavar="N",
        type=non_negative_int,
        help="of the clients' ids and random numbers, and of sampling (default: drawn, and written down)",
    )
    workers = parser.add_argument_group("workers")
    workers.add_argument(
        "--max-workers",
        metavar="N",
        type=positive_int,
        help="how many messages are handled at a time, at most (default: the number of cores, or the "
        "shares of GPUs if these are more)",
    )
    workers.add_argument(
        "--calls-per-worker",
        metavar="N|auto",
        type=_calls,
        default=_AUTO,
        help="how many clients one worker may run in a row before it exits; with a GPU it exits at the end "
        "of the round at the latest (default: auto, which is 1 without a GPU)",
    )
    workers.add_argument(
        "--verify-recycling",
        action="store_true",
        help="run a few clients in fresh workers as well, and compare the weights",
    )
    workers.add_argument(
        "--preload",
        metavar="'MODULE:FUNCTION K=V ...'",
        action="append",
        default=[],
        help="function that loads data, called once, with these arguments, where workers are forked from: "
        "all of them find what it keeps in its module; may be repeated",
    )
    workers.add_argument(
        "--timeout-s",
        metavar="S",
        type=seconds,
        help="seconds a client may take, counted from its lease; then it is dropped (default: no limit)",
    )
    workers.add_argument(
        "--state-memory",
        metavar="SIZE",
        type=text_value,
        default=_STATE_MEMORY,
        help=f"memory for the clients' states, such as 500MiB; what does not fit goes to files (default: "
        f"{_STATE_MEMORY})",
    )
    workers.add_argument(
        "--keep-going",
        action="store_true",
        help="go on when every client failed in the first round, or in three rounds in a row (default: such "
        "a run ends with status 1)",
    )
    gpu_options.add_arguments(parser, _TEXTS)
    output = parser.add_argument_group("output")
    where = output.add_mutually_exclusive_group()
    where.add_argument(
        "--log-dir",
        metavar="DIR",
        type=folder,
        default=_LOG_DIR,
        help=f"where the run's folder is made (default: {_LOG_DIR})",
    )
    where.add_argument(
        "--resume",
        metavar="DIR",
        type=folder,
        help="folder of an earlier run of the same app: go on after the last round that it finished",
    )
    output.add_argument(
        "--no-progress", dest="progress", action="store_false", help="show no bars and no summary"
    )
    output.add_argument("--no-report", dest="report", action="store_false", help="write no report at the end")


def run(arguments: argparse.Namespace) -> int:
    """Run the simulation.

    Returns
    -------
    int
        0: it is complete. 1: the app raised an exception, or every client failed. 130: Ctrl-C. 143: SIGTERM.
        129: SIGHUP.

    Raises
    ------
    ConfigError
        If an option cannot be used; then nothing was started or written. Only ``--preload`` has to be tried.
    """
    with ended_by_signals() as received:
        try:
            status = _run(arguments)
        except KeyboardInterrupt:
            status = _INTERRUPTED
    return 128 + received[0] if received and status == _INTERRUPTED else status


def _run(arguments: argparse.Namespace) -> int:
    app = FlowerApp.load(arguments.app_dir)
    num_supernodes, run_config = _federation(arguments)
    app.simulated(run_config, num_supernodes)
    memory_bytes(arguments.state_memory, "--state-memory")
    if arguments.verify_recycling and arguments.calls_per_worker == 1:
        raise ConfigError(
            "--verify-recycling compares nothing with --calls-per-worker 1: no worker is recycled"
        )
    preload = given_preload(arguments.preload, app.path)
    gpu = GPUOptions.from_arguments(arguments)
    _set_environment(gpu)
    if arguments.resume is None:
        _check_log_dir(arguments.log_dir)
    result = _simulate(
        app.path,
        num_supernodes,
        # With bars the run itself shows the summary below them.
        summary=arguments.progress and is_quiet(arguments),
        run_config=run_config,
        max_workers=arguments.max_workers,
        calls_per_worker=None if arguments.calls_per_worker == _AUTO else arguments.calls_per_worker,
        verify_recycling=arguments.verify_recycling,
        seed=arguments.seed,
        log_dir=arguments.log_dir,
        resume=arguments.resume,
        progress=arguments.progress and not is_quiet(arguments),
        state_memory=arguments.state_memory,
        keep_going=arguments.keep_going,
        preload=preload,
        **_call_options(gpu, arguments.timeout_s),
    )
    if isinstance(result, int):
        return result
    if arguments.report and result.folder is not None:
        _write_report(result.folder, is_told=arguments.progress)
    return 0


def _federation(arguments: argparse.Namespace) -> tuple[int, dict[str, ConfigValue]]:
    """Return the number of nodes, by default that of the run that goes on, and the values of a run config."""
    given = given_run_config(arguments.run_config)
    if arguments.resume is None:
        if arguments.num_supernodes is None:
            raise ConfigError("--num-supernodes N is missing: how many virtual clients are there?")
        return arguments.num_supernodes, given
    _check_resume(arguments.resume)
    from flower_gpu.simulation.results import ResultFolder

    before = ResultFolder.reopen(arguments.resume).read_config()
    return arguments.num_supernodes or before["num_supernodes"], given


def given_run_config(texts: Sequence[str]) -> dict[str, ConfigValue]:
    """Read ``--run-config``: pairs, or the name of a TOML file, as ``flwr run`` takes them.

    Raises
    ------
    ConfigError
        If that is neither.
    """
    values: dict[str, ConfigValue] = {}
    for text in texts:
        if text.endswith(".toml") and "=" not in text:
            try:
                values.update(flatten(tomllib.loads(Path(text).expanduser().read_text(encoding="utf-8"))))
            except OSError as error:
                raise ConfigError(f"--run-config {text}: {error.strerror}") from None
            except ValueError as error:
                raise ConfigError(f"--run-config {text}: {error}") from None
        else:
            values.update(parse_pairs("--run-config", [text]))
    return values


def given_preload(texts: Sequence[str], app: Path) -> list[tuple[str, dict[str, ConfigValue]]]:
    """Read ``--preload``: functions, each with its arguments.

    Raises
    ------
    ConfigError
        If one is not of the form ``package.module:function key=value ...``, or its module is neither in the
        app's folder nor installed.
    """
    found: list[tuple[str, dict[str, ConfigValue]]] = []
    for text in texts:
        name, _, pairs = text.strip().partition(" ")
        arguments = parse_pairs("--preload", [pairs]) if pairs.strip() else {}
        try:
            functions = checked((name, arguments))
            check_modules(functions, [str(app)])
            found += functions
        except ConfigError as error:
            raise ConfigError(f"--preload: {error}") from None
    return found


def _simulate(app: Path, num_supernodes: int, *, summary: bool, **settings: Any) -> SimulationResult | int:
    # Here: what they import takes a second, and an error in an option is there at once.
    from flower_gpu.simulation.results import SimulationStoppedError
    from flower_gpu.simulation.run import simulate
    from flower_gpu.simulation.summary_text import summary_lines

    try:
        result = simulate(app, num_supernodes, **settings)
    except SimulationStoppedError as stopped:
        _say(_how_to_go_on(stopped.folder, stopped.can_resume))
        return _INTERRUPTED
    except ClientsFailedError as failed:
        _say(str(failed))
        _say(_once_mended(failed.folder, failed.can_resume))
        return 1
    except (ConfigError, GPUUnavailableError):
        raise
    except Exception as error:
        print(shortened(traceback.format_exc()), end="", file=sys.stderr)
        _say(f"{_first_line(error)} (the traceback is above)")
        return 1
    if summary:
        where = None if result.folder is None else short(result.folder)
        print("\n".join(summary_lines(result.summary, where)), file=sys.stderr, flush=True)
    return result


def _write_report(path: Path, *, is_told: bool) -> None:
    from flower_gpu.monitor.report.write import write_at_end  # matplotlib takes a second

    report = write_at_end(path)
    if report is not None and is_told:
        print(f"report  {short(report)}", file=sys.stderr, flush=True)


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
    more = f"all failures are in {short(path / FILE_NAME)}; {more}"
    if can_resume:
        more += f"; once the app is mended, add this to the same command: --resume {short(path)}"
    return more


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return shortened(f"{type(error).__name__}: {lines[0]}") if lines else type(error).__name__


def _say(text: str) -> None:
    print(f"flower-gpu simulate: {text}", file=sys.stderr, flush=True)


def _set_environment(gpu: GPUOptions) -> None:
    """Let the options hold for the server's own calls as well, whatever the variables were."""
    env = gpu.environment(os.environ)
    try:
        GPUSettings.resolve(environ=env)
    except ConfigError as error:
        raise ConfigError(gpu.in_their_words(str(error))) from error
    for name in os.environ.keys() - env.keys():
        del os.environ[name]
    os.environ.update(env)


def _call_options(gpu: GPUOptions, timeout_s: float | None) -> dict[str, Any]:
    options = {
        "timeout_s": timeout_s,
        "gpu": gpu.gpu,
        "gpu_num": None if gpu.gpu_num is None else ",".join(map(str, gpu.gpu_num)),
        "num_gpus": gpu.num_gpus,
        "gpu_memory": gpu.gpu_memory,
        "lease_timeout_s": gpu.lease_timeout_s,
        "on_oom": gpu.on_oom,
    }
    return {name: value for name, value in options.items() if value is not None}


def _check_resume(path: Path) -> None:
    if not path.is_dir():
        raise ConfigError(f"--resume {path_text(path)}: there is no such folder")
    from flower_gpu.simulation.results import ResultFolder

    ResultFolder.reopen(path)


def _check_log_dir(log_dir: Path) -> None:
    nearest = next(path for path in (log_dir.absolute(), *log_dir.absolute().parents) if path.exists())
    if not nearest.is_dir():
        raise ConfigError(f"--log-dir {path_text(log_dir)}: {path_text(nearest)} is not a folder")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigError(f"--log-dir {path_text(log_dir)}: no permission to write in {path_text(nearest)}")


def _calls(text: str) -> int | str:
    return text if text == _AUTO else positive_int(text)
