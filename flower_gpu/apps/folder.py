"""The folder of one run, and the names of everything in it."""

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

#: In the folder of a checkpoint: without it there is none.
CHECKPOINT_INDEX = "checkpoint.json"
#: A key that only the settings of this command's runs have.
_KEYS: Final = {"simulate": "num_supernodes", "launch": "node_configs"}
_LOCK_WAIT_S = 1.0  # a process that was killed takes a moment to end


class RunFolder:
    """Paths of one run's files; nothing else in the package knows their names."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.shown = short(path)  # for a message: relative where that is shorter
        self.trace = path / trace.FILE_NAME  # events of the run
        self.result = path / "result.json"  # what came of it
        self.metrics = path / "metrics.csv"  # by round
        self.report = path / "report.html"  # a page with pictures
        self.failures = path / "failures.log"  # why messages to clients failed; there if any did
        self.client_log = path / LOG_NAME  # what clients of a simulation write
        self.model = path / "model.safetensors"  # the final one
        self.checkpoint = path / "checkpoint"  # folder of the last finished round
        self.states = path / "states"  # folder of what virtual clients keep and the memory has no room for
        self.tensorboard = path / "tensorboard"  # folder of event files
        self.flwr_home = path / "flwr"  # Flower's configuration and state of this run only
        self.mps = path / "mps"  # folder of the MPS daemon's logs
        self.app = path / "app"  # a copy of the app, where one is needed

    @classmethod
    def create(cls, log_dir: Path) -> RunFolder:
        """Make a folder named after the time that no other run can make, too; raises ConfigError."""
        name = time.strftime("%Y-%m-%d_%H-%M-%S")
        try:
            log_dir.mkdir(parents=True, exist_ok=True)
            for number in itertools.count(1):
                path = log_dir.resolve() / (name if number == 1 else f"{name}-{number}")
                try:
                    path.mkdir()  # atomic: of two runs in the same second only one gets this name
                except FileExistsError:
                    continue
                return cls(path)
        except OSError as error:
            raise ConfigError(f"--log-dir {path_text(log_dir)}: {error.strerror}") from None
        raise AssertionError("count() does not end")

    def log(self, process: str) -> Path:
        """Log file of a process."""
        return self.path / f"{process}.log"

    @property
    def has_checkpoint(self) -> bool:
        """Whether the run can go on."""
        return (self.checkpoint / CHECKPOINT_INDEX).is_file()

    def settings(self) -> dict[str, Any] | None:
        """Return the settings of the run's first start, or None where the trace has none."""
        with suppress(OSError):
            for event in trace.read(self.trace, only="run_started"):
                found = event.get("settings")
                return found if isinstance(found, dict) else None
        return None


@contextmanager
def in_use(path: Path) -> Iterator[None]:
    """Have no other process go on with the run that has this file, while in the context.

    Raises ConfigError if there is one.
    """
    path.open("ab").close()  # others may read it, as any file
    with ExitStack() as stack:
        try:
            stack.enter_context(files.locked(path, _LOCK_WAIT_S))
        except TimeoutError:
            raise ConfigError(
                f"another process goes on with the run in {path_text(path.parent)}. End it, or give another "
                "folder"
            ) from None
        except OSError:  # a file system without locks
            pass
        yield


def earlier_run(path: Path, command: str) -> tuple[RunFolder, dict[str, Any]]:
    """Return the folder of a run of a command that is to be resumed, and its settings.

    Raises ConfigError if it is no folder of such a run, or has no checkpoint.
    """
    folder = RunFolder(path.expanduser().resolve())
    if not folder.path.is_dir():
        raise ConfigError(f"--resume {path_text(path)}: there is no such folder")
    settings = folder.settings()
    if settings is None or _KEYS[command] not in settings:
        raise ConfigError(
            f"--resume {path_text(path)}: it has no {folder.trace.name} of `flower-gpu {command}`; the "
            "folder of such a run is needed, such as runs/2026-01-31_12-00-00"
        )
    if not folder.has_checkpoint:
        raise ConfigError(
            f"--resume {path_text(path)}: it has no checkpoint, because {_why_no_checkpoint(folder)}. Start "
            "a new run without --resume"
        )
    return folder, settings


def _why_no_checkpoint(folder: RunFolder) -> str:
    """Return why a run has left no checkpoint, by the first start of a strategy in its trace."""
    with suppress(OSError):
        for event in trace.read(folder.trace, only="strategy_started"):
            if event.get("resumes") is not None:
                break  # its rounds have checkpoints, and none has finished
            return (
                f"the state of its strategy {event.get('strategy')} is not known. Strategies of "
                "flwr.serverapp.strategy, flower_gpu.FedAvg and FedBuff have checkpoints, and so has each "
                "strategy of the Message API with state_dict() and load_state_dict()"
            )
        else:
            return "it ended before a strategy was started, or its ServerApp uses no strategy of Flower's"
    return "it ended before its first round was finished"


def check_same_app(before: Mapping[str, Any], name: str, where: Path | None, resume: object) -> None:
    """Check that an earlier run, with these settings, is one of this app; raises ConfigError."""
    if before.get("app", name) != name:
        theirs = _shown(before["app"], before.get("app_folder"))
        raise ConfigError(
            f"--resume {path_text(str(resume))}: that is a run of {theirs}, not of {_shown(name, where)}. "
            "Give that app, or start a new run without --resume"
        )


def _shown(name: str, folder: object) -> str:
    return f"{name} ({path_text(str(folder))})" if folder else name


def short(path: Path) -> str:
    """Write a path for a shell, relative to the current folder if it lies in it."""
    try:
        return path_text(path.relative_to(Path.cwd()))
    except (ValueError, OSError):
        return path_text(path)


def check_log_dir(log_dir: Path) -> None:
    """Find out, without making it, whether a folder of ``--log-dir`` could be made.

    Raises ConfigError if it could not.
    """
    nearest = next(path for path in (log_dir.absolute(), *log_dir.absolute().parents) if path.exists())
    if not nearest.is_dir():
        raise ConfigError(f"--log-dir {path_text(log_dir)}: {path_text(nearest)} is not a folder")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigError(f"--log-dir {path_text(log_dir)}: no permission to write in {path_text(nearest)}")


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file such that a reader sees all of it or none."""
    text = json.dumps(content, indent=2, allow_nan=False) + "\n"
    with files.replaced(path, has_one_writer=True) as new:
        new.write_text(text, encoding="utf-8")
