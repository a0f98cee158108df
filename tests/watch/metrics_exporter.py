"""`flower-gpu metrics` in a process of its own, and runs for it to find."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from cli.command_shell import Shell
from prometheus_client.parser import text_string_to_metric_families as parse

from flower_gpu import trace
from flower_gpu.apps.registry import registered

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def samples_of(text: str) -> Samples:
    """Return the samples of an answer, each of which must be there once."""
    found: Samples = {}
    for family in parse(text):
        assert family.documentation, f"no HELP for {family.name}"
        for sample in family.samples:
            key = sample.name, frozenset(sample.labels.items())
            assert key not in found
            found[key] = sample.value
    return found


def value(samples: Samples, name: str, /, **labels: object) -> float | None:
    """Return the one sample with at least these labels; None if there is none."""
    wanted = {(label, str(text)) for label, text in labels.items()}
    found = [value for (of, has), value in samples.items() if of == f"flower_gpu_{name}" and wanted <= has]
    assert len(found) <= 1, found
    return found[0] if found else None


def counters(samples: Samples) -> Samples:
    """Return what must never go down: counters, and the parts of the histogram."""
    ends = ("_total", "_bucket", "_sum", "_count")
    return {key: value for key, value in samples.items() if key[0].endswith(ends)}


class Exporter:
    """The command, started with these arguments."""

    def __init__(self, shell: Shell, *arguments: str) -> None:
        command = (sys.executable, "-m", "flower_gpu.cli", "metrics", "--port", "0", *arguments)
        self.process = shell.start(*command, stderr=subprocess.PIPE)
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()

    def get(self, accept: str = "*/*") -> str:
        """Return an answer."""
        request = urllib.request.Request(self.url, headers={"Accept": accept})
        with urllib.request.urlopen(request, timeout=60) as answer:
            text: str = answer.read().decode()
            return text

    def __call__(self) -> Samples:
        """Return the samples of an answer."""
        return samples_of(self.get())


class Run:
    """A run that is registered, and whose trace is written here."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, event: str, **fields: Any) -> None:
        """Append an event."""
        trace.write_to(self.folder, event, **fields)

    def write_text(self, text: str) -> None:
        """Append what may be no whole line."""
        with (self.folder / trace.FILE_NAME).open("a") as file:
            file.write(text)

    def worker(self, call: str, outcome: str | None = None, pid: int = 1, **fields: Any) -> None:
        """Append what a worker tells, up to its end if an outcome is given."""
        told = {"call": call, "client": "3", "task": "fit", "round": 1, "pid": pid, **fields}
        self.write("worker_started", **{"start_method": "forkserver", **told})
        if outcome is not None:
            self.write("worker_finished", **{"start_method": "forkserver", **told}, outcome=outcome)


@contextmanager
def run(shell: Shell, folder: Path, kind: str = "launch", name: str = "app") -> Iterator[Run]:
    """Register a run where the shell's commands look, as long as the context is open."""
    folder.mkdir(parents=True, exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLOWER_GPU_STATE_DIR", str(shell.state))
        with registered(folder, kind, name) as is_first:
            assert is_first
            patch.undo()
            yield Run(folder)


def line(event: Mapping[str, Any]) -> str:
    """Return a line of a trace."""
    return json.dumps({"v": trace.VERSION, "time": time.time(), **event}) + "\n"
