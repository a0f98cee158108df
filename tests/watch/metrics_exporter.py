"""`flower-gpu metrics` in a separate process, and helpers to read its metrics."""

from __future__ import annotations

import subprocess
import sys
import urllib.request

from command_shell import Shell
from prometheus_client.parser import text_string_to_metric_families as parse

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def samples_of(text: str) -> Samples:
    """Return the samples of a response. No sample may occur twice."""
    samples: Samples = {}
    for family in parse(text):
        assert family.documentation, f"no HELP for {family.name}"
        for sample in family.samples:
            key = sample.name, frozenset(sample.labels.items())
            assert key not in samples
            samples[key] = sample.value
    return samples


def value(samples: Samples, name: str, /, **labels: object) -> float | None:
    """Return the value of the sample that has these labels and maybe others, or None."""
    wanted = {(label, str(text)) for label, text in labels.items()}
    values = [
        value
        for (sample_name, sample_labels), value in samples.items()
        if sample_name == f"flower_gpu_{name}" and wanted <= sample_labels
    ]
    assert len(values) <= 1, values
    return values[0] if values else None


def counters(samples: Samples) -> Samples:
    """Return the samples that must never decrease: counters and the parts of the histogram."""
    suffixes = ("_total", "_bucket", "_sum", "_count")
    return {key: value for key, value in samples.items() if key[0].endswith(suffixes)}


class Exporter:
    """A process of `flower-gpu metrics` with the given arguments."""

    def __init__(self, shell: Shell, *arguments: str) -> None:
        command = (sys.executable, "-m", "flower_gpu.cli", "metrics", "--port", "0", *arguments)
        self.process = shell.start(*command, stderr=subprocess.PIPE)
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()

    def get(self, accept: str = "*/*") -> str:
        """Return the text of a response."""
        request = urllib.request.Request(self.url, headers={"Accept": accept})
        with urllib.request.urlopen(request, timeout=60) as response:
            text: str = response.read().decode()
            return text

    def __call__(self) -> Samples:
        """Return the samples of a response."""
        return samples_of(self.get())
