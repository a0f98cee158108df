"""The folder of a run, and the names of all files in it.

Two processes must not write into the same folder. A new run gets a folder that no other run has: creating it
with ``mkdir`` is atomic. A resumed run uses the folder of an earlier run. Another process may already have
resumed that run, or its first process may still be running. :func:`in_use` therefore holds a lock on the
trace for as long as the run lasts. The kernel releases the lock when the process ends, however it ends.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from flower_gpu import files, trace
from flower_gpu.errors import ConfigError
from flower_gpu.printable import path_text
from flower_gpu.workers.output import LOG_NAME

#: Name of the index file of a checkpoint. A folder without it holds no checkpoint.
CHECKPOINT_INDEX = "checkpoint.json"
#: By command, a key that occurs only in the settings of its runs.
_KEYS: Final = {"simulate": "num_supernodes", "launch": "node_configs"}
#: Seconds to wait for the lock, because a killed process takes a moment to end.
_LOCK_WAIT_S = 1.0


class RunFolder:
    """The paths of a run's files. Other modules have the names of the trace and of the clients' log."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.shown = short(path)  # path for messages, relative to the current folder if possible
        self.trace = path / trace.FILE_NAME  # events of the run
        self.result = path / "result.json"  # result of the run
        self.metrics = path / "metrics.csv"  # metrics by round
        self.report = path / "report.html"  # HTML page with figures
        self.failures = path / "failures.log"  # errors of failed messages, if any message failed
        self.client_log = path / LOG_NAME  # output of a simulation's clients
        self.model = path / "model.safetensors"  # final model
        self.checkpoint = path / "checkpoint"  # folder with the checkpoint of the last finished round
        self.states = path / "states"  # folder for states of virtual clients that do not fit into memory
        self.tensorboard = path / "tensorboard"  # folder of event files
        self.flwr_home = path / "flwr"  # Flower's configuration and state, for this run only
        self.mps = path / "mps"  # folder of the MPS daemon's logs
        self.app = path / "app"  # copy of the app, if the run needs a copy

    @classmethod
    def create(cls, log_dir: Path) -> RunFolder:
        """Create a folder for a new run, named after the current time. No other run gets the same folder.

        Raises ConfigError if the folder cannot be created.
        """
        name = time.strftime("%Y-%m-%d_%H-%M-%S")
        try:
            log_dir.mkdir(parents=True, exist_ok=True)
            for number in itertools.count(1):
                path = log_dir.resolve() / (name if number == 1 else f"{name}-{number}")
                try:
                    # mkdir() is atomic. If two runs start in the same second, only one of them gets this
                    # name.
                    path.mkdir()
                except FileExistsError:
                    continue
                return cls(path)
        except OSError as error:
            raise ConfigError(f"--log-dir {path_text(log_dir)}: {error.strerror}") from None
        raise AssertionError("count() does not end")

    def log(self, process: str) -> Path:
        """Return the path of a process's log file."""
        return self.path / f"{process}.log"

    @property
    def has_checkpoint(self) -> bool:
        """True if the run has a checkpoint, so it can be resumed."""
        return (self.checkpoint / CHECKPOINT_INDEX).is_file()

    def settings(self) -> dict[str, Any] | None:
        """Return the settings of the run's first start, or None if the trace has no settings."""
        with suppress(OSError):
            for event in trace.read(self.trace, only="run_started"):
                settings = event.get("settings")
                return settings if isinstance(settings, dict) else None
        return None


@contextmanager
def in_use(path: Path) -> Iterator[None]:
    """Lock a run's trace while in the context, so that no other process continues the same run.

    Raises ConfigError if another process holds the lock.
    """
    # Create the trace with normal permissions before it is locked, so that other accounts may read it.
    path.open("ab").close()
    with ExitStack() as stack:
        try:
            stack.enter_context(files.locked(path, _LOCK_WAIT_S))
        except TimeoutError:
            raise ConfigError(
                f"another process continues the run in {path_text(path.parent)}. End it, or give another "
                "folder"
            ) from None
        except OSError:
            # The file system does not support locks. Run without one.
            pass
        yield


def earlier_run(path: Path, command: str) -> tuple[RunFolder, dict[str, Any]]:
    """Return the folder of the run at ``path``, which is to be resumed, and the settings of its first start.

    Raises ConfigError if the folder does not hold a run of ``command``, or if the run has no checkpoint.
    """
    folder = RunFolder(path.expanduser().resolve())
    if not folder.path.is_dir():
        raise ConfigError(f"--resume {path_text(path)}: there is no such folder")
    settings = folder.settings()
    if settings is None or _KEYS[command] not in settings:
        raise ConfigError(
            f"--resume {path_text(path)}: it has no {folder.trace.name} of `flower-gpu {command}`; give "
            "the folder of such a run, such as runs/2026-01-31_12-00-00"
        )
    if not folder.has_checkpoint:
        raise ConfigError(
            f"--resume {path_text(path)}: it has no checkpoint, because {_why_no_checkpoint(folder)}. Start "
            "a new run without --resume"
        )
    return folder, settings


def _why_no_checkpoint(folder: RunFolder) -> str:
    """Return the reason why a run has no checkpoint, from the first start of a strategy in its trace."""
    with suppress(OSError):
        for event in trace.read(folder.trace, only="strategy_started"):
            if event.get("resumes") is not None:
                # The strategy supports checkpoints, so no round can have finished.
                break
            return (
                f"the state of its strategy {event.get('strategy')} is not known. Strategies of "
                "flwr.serverapp.strategy, flower_gpu.FedAvg and FedBuff have checkpoints, and so do all "
                "strategies of the Message API with state_dict() and load_state_dict()"
            )
        else:
            return (
                "it ended before a strategy was started, or its ServerApp does not use a strategy of Flower's"
            )
    return "it ended before its first round was finished"


def check_rounds_left(finished: int, num_rounds: int | None) -> None:
    """Raise ConfigError if an earlier run has finished more rounds than it is asked for now.

    ``num_rounds``: the number that is asked for, or None if it is unknown.
    """
    if num_rounds is not None and num_rounds < finished:
        raise ConfigError(
            f"nothing is left to do: the run has finished {finished} rounds, and is asked for {num_rounds}. "
            f"Ask for more than {finished} rounds, or start a new run without --resume"
        )


def check_same_app(earlier: Mapping[str, Any], name: str, app_path: Path | None, resume: object) -> None:
    """Raise ConfigError unless an earlier run, with settings ``earlier``, was a run of the app ``name``.

    ``app_path``: folder of the app, or None. ``resume``: the value of ``--resume``, for the error.
    """
    if earlier.get("app", name) != name:
        other_app = _shown(earlier["app"], earlier.get("app_folder"))
        raise ConfigError(
            f"--resume {path_text(str(resume))}: that is a run of {other_app}, not of "
            f"{_shown(name, app_path)}. Give that app, or start a new run without --resume"
        )


def _shown(name: str, folder: object) -> str:
    return f"{name} ({path_text(str(folder))})" if folder else name


def short(path: Path) -> str:
    """Return a path as text for a shell, relative to the current folder if the path is inside it."""
    try:
        return path_text(path.relative_to(Path.cwd()))
    except (ValueError, OSError):
        return path_text(path)


def check_log_dir(log_dir: Path) -> None:
    """Raise ConfigError if the folder of ``--log-dir`` could not be created. Nothing is created."""
    nearest = next(path for path in (log_dir.absolute(), *log_dir.absolute().parents) if path.exists())
    if not nearest.is_dir():
        raise ConfigError(f"--log-dir {path_text(log_dir)}: {path_text(nearest)} is not a folder")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigError(f"--log-dir {path_text(log_dir)}: no permission to write in {path_text(nearest)}")


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file atomically, so that a reader never sees a part of the content."""
    text = json.dumps(content, indent=2, allow_nan=False) + "\n"
    with files.replaced(path, has_one_writer=True) as new:
        new.write_text(text, encoding="utf-8")
