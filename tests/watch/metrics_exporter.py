"""`flower-gpu metrics` in a process of its own, and what it answers."""

from __future__ import annotations

import subprocess
import sys
import urllib.request

from cli.command_shell import Shell
from prometheus_client.parser import text_string_to_metric_families as parse

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
