"""Makes the report of a run and writes it."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from flower_gpu import files, trace
from flower_gpu.apps import registry
from flower_gpu.errors import ConfigError
from flower_gpu.printable import path_text
from flower_gpu.watch.history import History
from flower_gpu.watch.report.calls import client_rows, tries_of
from flower_gpu.watch.report.clock import Clock
from flower_gpu.watch.report.drawing import ClientColours, Picture
from flower_gpu.watch.report.figures_gpus import memory_picture, utilization_picture
from flower_gpu.watch.report.figures_rounds import rounds_picture
from flower_gpu.watch.report.figures_workers import workers_picture
from flower_gpu.watch.report.leases import holdings_of
from flower_gpu.watch.report.page import page
from flower_gpu.watch.report.totals import totals_of

FILE_NAME = "report.html"


def write_report(run_dir: Path, output: Path | None = None, png: bool = False) -> Path:
    """Write a report about a run, also about one that goes on or was killed, and return its path.

    By default it is ``report.html`` in the run's folder. With ``png`` each picture is written as a PNG as
    well, into a folder with the report's name.

    Raises
    ------
    ConfigError
        If there is no trace, or nothing can be written there.
    """
    source = run_dir / trace.FILE_NAME
    _check(source)
    target = output if output is not None else run_dir / FILE_NAME
    history = History()
    try:
        history.feed(trace.read(source))
    except OSError as error:
        raise ConfigError(f"{path_text(source)}: {error.strerror}") from None
    with _matplotlib():
        text, images = _made(history, run_dir, png)
    try:
        _replace(target, text.encode())
        for name, data in images.items():
            folder = target.with_suffix("") if target.suffix else target.with_name(f"{target.name}-figures")
            folder.mkdir(exist_ok=True)
            _replace(folder / f"{name}.png", data)
    except OSError as error:
        raise ConfigError(
            f"{path_text(error.filename or target)}: {error.strerror}; name another file with --output"
        ) from None
    return target


def write_at_end(run_dir: Path) -> Path | None:
    """Write the report of a run that is over; return None if there is none, also after Ctrl-C.

    What goes wrong with it is told, and is no failure of the run.
    """
    try:
        return write_report(run_dir)
    except KeyboardInterrupt:
        return None
    except Exception as error:
        lines = str(error).splitlines()
        with suppress(OSError):
            told = f"{type(error).__name__}: {lines[0] if lines else ''}"
            print(f"flower-gpu: no report: {told}", file=sys.stderr)
        return None


def _check(source: Path) -> None:
    try:
        is_there = source.is_file()
    except OSError as error:
        raise ConfigError(f"{path_text(source)}: {error.strerror}") from None
    if not is_there:
        raise ConfigError(
            f"{path_text(source)} is not there: a report is made from the trace of a run. Give the folder of "
            "a run of `flower-gpu launch` or `simulate`, or what FLOWER_GPU_RUN_DIR was"
        )


def _made(history: History, run_dir: Path, png: bool) -> tuple[str, dict[str, bytes]]:
    clock = Clock.of(history)
    tries = tries_of(history, clock)
    holdings = {gpu.uuid: holdings_of(history, clock, gpu.uuid) for gpu in history.gpus_of_run}
    colours = ClientColours([*(one.client for one in tries), *(lease.client for lease in history.leases)])
    drawn: list[Picture | None] = [
        memory_picture(history, clock, holdings, colours),
        utilization_picture(history, clock),
        workers_picture(history, clock, tries),
        rounds_picture(history.evaluations),
    ]
    pictures = [picture for picture in drawn if picture is not None]
    text = page(
        history,
        totals_of(history, clock, tries, holdings),
        client_rows(tries),
        pictures,
        folder=str(run_dir.absolute()),
        is_going_on=_is_going_on(run_dir),
    )
    return text, {picture.name: picture.png for picture in pictures} if png else {}


def _is_going_on(run_dir: Path) -> bool:
    folder = run_dir.resolve()
    return any(Path(run.folder).resolve() == folder for run in registry.running())


@contextmanager
def _matplotlib() -> Iterator[None]:
    """Have matplotlib without the user's settings, and without files that it would leave in their home."""
    with ExitStack() as stack:
        if "MPLCONFIGDIR" not in os.environ and "matplotlib" not in sys.modules:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="flower-gpu-matplotlib-"))
            _copy_font_lists(Path(folder))
            os.environ["MPLCONFIGDIR"] = folder
            stack.callback(os.environ.pop, "MPLCONFIGDIR", None)
        import matplotlib

        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # such as letters that its font does not have
        stack.enter_context(matplotlib.rc_context())
        matplotlib.rcdefaults()
        yield


def _copy_font_lists(folder: Path) -> None:
    """Take over lists of fonts that the user's programs have made: with many fonts one takes seconds."""
    with suppress(OSError, RuntimeError):  # there is no home
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        for path in (cache / "matplotlib").glob("fontlist-*.json"):
            shutil.copy(path, folder)


def _replace(path: Path, data: bytes) -> None:
    with files.replaced(path) as new:
        new.write_bytes(data)
