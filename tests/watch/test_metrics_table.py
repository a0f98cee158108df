"""Names and texts of the metrics: as Prometheus wants them, and as the documentation tells them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from flower_gpu.cli import metrics as command
from flower_gpu.watch.metrics import METRICS, PREFIX, Collector, Row

PAGE = Path(__file__).parents[2] / "docs/reference/metrics.md"

# Of promlint, the rules behind `promtool check metrics`:
# https://github.com/prometheus/client_golang/tree/main/prometheus/testutil/promlint/validations
BASE_UNITS = {"amperes", "bytes", "celsius", "grams", "joules", "kelvin", "meters", "metres", "moles",
              "ratio", "seconds", "volts"}  # fmt: skip
OTHER_UNITS = {"hours", "minutes", "days", "weeks", "bits", "fahrenheit", "percent"}
PREFIXES = ("pico", "nano", "micro", "milli", "centi", "deci", "deca", "hecto", "kilo", "kibi", "mega",
            "mebi", "giga", "gibi", "tera", "tebi", "peta", "pebi")  # fmt: skip
ABBREVIATIONS = {"s", "ms", "us", "ns", "sec", "b", "kb", "mb", "gb", "tb", "pb", "m", "h", "d"}
TYPES = {"gauge", "counter", "summary", "histogram", "untyped"}


def full_name(row: Row) -> str:
    return f"{PREFIX}{row.name}{'_total' if row.kind == 'counter' else ''}"


def complaints(name: str, kind: str, help_: str, labels: tuple[str, ...]) -> list[str]:
    """Return what promtool would say of a metric."""
    words = name.split("_")
    told = []
    if not help_:
        told.append("no help text")
    if (kind == "counter") != name.endswith("_total"):
        told.append('counter metrics, and these only, should have "_total" suffix')
    if kind != "histogram" and name.endswith(("_bucket", "_count", "_sum")):
        told.append("suffix of a histogram")
    if {"le", "quantile"} & set(labels):
        told.append("label of a histogram")
    if TYPES & set(words):
        told.append("metric name should not include type")
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name):
        told.append("not in snake_case")
    if ABBREVIATIONS & set(words):
        told.append("abbreviated unit")
    units = [word for word in words if word in OTHER_UNITS or any(
        word.startswith(prefix) and word.removeprefix(prefix) in BASE_UNITS for prefix in PREFIXES
    )]  # fmt: skip
    if units:
        told.append(f"use base unit in place of {units}")
    if BASE_UNITS & set(words[:-1]) and words[-1] != "total":
        told.append("the unit comes last")
    return told


@pytest.mark.parametrize("row", METRICS.values(), ids=METRICS)
def test_names_are_as_prometheus_wants_them(row: Row) -> None:
    assert full_name(row).startswith("flower_gpu_")
    assert complaints(full_name(row), row.kind, row.help, row.labels) == []


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("flower_gpu_memory_mb", "gauge"),
        ("flower_gpu_memory_megabytes", "gauge"),
        ("flower_gpu_memory_bytes_used", "gauge"),
        ("flower_gpu_busy_percent", "gauge"),
        ("flower_gpu_workers_finished", "counter"),
        ("flower_gpu_memory_total", "gauge"),
        ("flower_gpu_lease_wait_seconds_sum", "gauge"),
        ("flower_gpu_leases_counter_total", "counter"),
        ("flower_gpu_leasesHeld", "gauge"),
    ],
)
def test_the_rules_find_names_that_break_them(name: str, kind: str) -> None:
    assert complaints(name, kind, "What it is.", ()) != []


def test_what_is_served_has_these_types_and_help_texts() -> None:
    class Described(Collector):
        def __init__(self) -> None:
            self._more_labels = ()

        def collect(self) -> Any:
            return self.describe()

    registry = CollectorRegistry()
    registry.register(Described())  # type: ignore[arg-type]
    text = generate_latest(registry).decode()
    assert re.findall(r"^# HELP (\S+) (.+)$", text, re.MULTILINE) == [
        (full_name(row), row.help) for row in METRICS.values()
    ]
    assert re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE) == [
        (full_name(row), row.kind) for row in METRICS.values()
    ]


def documented() -> list[tuple[str, ...]]:
    return re.findall(
        r"^\| `(flower_gpu_\w+)` \| (\w+) \| (.*?) ?\| (.+) \|$", PAGE.read_text(), re.MULTILINE
    )


def test_the_documentation_has_the_same_table() -> None:
    assert documented() == [
        (full_name(row), row.kind, ", ".join(f"`{label}`" for label in row.labels), row.help)
        for row in METRICS.values()
    ]


def test_the_documentation_has_the_commands_own_options() -> None:
    import argparse

    parser = argparse.ArgumentParser(add_help=False)
    command.add_arguments(parser)
    rows = dict(re.findall(r"^\| `(--[a-z-]+)(?: \w+)?` \| (.+) \|$", PAGE.read_text(), re.MULTILINE))
    assert rows == {action.option_strings[0]: action.help for action in parser._actions}


def test_examples_name_metrics_that_there_are() -> None:
    blocks = re.findall(r"```(?:text|yaml)\n(.*?)```", PAGE.read_text(), re.DOTALL)
    named = set(re.findall(r"flower_gpu_\w+", " ".join(blocks)))
    assert len(named) >= 4
    assert named <= {full_name(row) for row in METRICS.values()} | {"flower_gpu_lease_wait_seconds_bucket"}
