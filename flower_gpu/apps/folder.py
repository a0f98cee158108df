"""The folder of one run, and the names of everything in it."""

from __future__ import annotations

import itertools
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flower_gpu import files, trace
from flower_gpu.apps import failures
from flower_gpu.errors import ConfigError
from flower_gpu.printable import path_text


@dataclass(frozen=True)
class RunFolder:
    """Paths of one run's files; nothing else in the package knows their names."""

    path: Path

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

    @property
    def shown(self) -> str:
        """The path for a message: relative where that is shorter."""
        return short(self.path)

    @property
    def trace(self) -> Path:
        """Events of the run."""
        return self.path / trace.FILE_NAME

    @property
    def result(self) -> Path:
        """Metrics by round and the workers, as JSON."""
        return self.path / "result.json"

    @property
    def failures(self) -> Path:
        """Why messages to clients failed, with tracebacks; there if any did."""
        return self.path / failures.FILE_NAME

    @property
    def trackers(self) -> Path:
        """Ids of the run in trackers, as JSON; a run that is resumed goes on with them."""
        return self.path / "trackers.json"

    @property
    def tensorboard(self) -> Path:
        """Folder of TensorBoard's event files."""
        return self.path / "tensorboard"

    @property
    def settings(self) -> Path:
        """What was launched, as JSON."""
        return self.path / "launch.json"

    @property
    def model(self) -> Path:
        """Where an app that uses safetensors leaves its final global model."""
        return self.path / "model.safetensors"

    @property
    def flwr_home(self) -> Path:
        """Flower's configuration and state of this run only."""
        return self.path / "flwr"

    @property
    def app(self) -> Path:
        """A copy of the app, where one is needed."""
        return self.path / "app"

    @property
    def flower_status(self) -> Path:
        """What Flower says of the run at its end."""
        return self.path / "flwr-list.json"

    def log(self, process: str) -> Path:
        """Log file of a process."""
        return self.path / f"{process}.log"


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
