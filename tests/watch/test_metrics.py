"""The metrics that `flower-gpu metrics` serves for stub GPUs, real leases and runs."""

from __future__ import annotations

import argparse
import re
import signal
import socket
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from command_shell import Shell
from metrics_exporter import Exporter, value
from nvml_stub import GIB, Host
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics import parser as openmetrics
from top_traces import run_of

from flower_gpu.cli import main as cli
from flower_gpu.cli.watching import METRICS as COMMAND
from flower_gpu.watch.host_look import look_at_host
from flower_gpu.watch.metrics import METRICS, PREFIX, Collector, MetricRow

PAGE = Path(__file__).parents[2] / "docs/reference/metrics.md"
CAPACITY = 16 * GIB - 256 * 2**20


def test_gpus_and_leases(shell: Shell, host: Host) -> None:
    shell.on(host)
    host.set(0, util=37, temp=61, used=GIB)
    shell.holder("fit of client 0", 4 * GIB)
    shell.holder("fit of client 1", 12 * GIB)
    shell.waiter("fit of client 2", "alone")
    scrape = Exporter(shell)
    samples = scrape()
    first = {"gpu": 0, "uuid": host.uuids[0], "name": "NVIDIA Stub 16GB"}
    leased = [value(samples, "memory_leased_bytes", uuid=uuid) for uuid in host.uuids]
    assert value(samples, "gpus") == 2
    assert value(samples, "ledger_up") == 1
    assert (value(samples, "leases_held"), value(samples, "leases_waiting")) == (2, 1)
    assert sorted(leased, key=str) == [12 * GIB, 4 * GIB]
    assert value(samples, "usable", **first) == 1
    assert value(samples, "memory_total_bytes", **first) == 16 * GIB
    assert value(samples, "memory_used_bytes", **first) == GIB
    assert value(samples, "memory_capacity_bytes", **first) == CAPACITY - GIB
    assert value(samples, "utilization_ratio", **first) == 0.37
    assert value(samples, "temperature_celsius", **first) == 61
    # A GPU is lost and later usable again.
    host.set(1, lost=True)
    samples = scrape()
    assert value(samples, "gpus") == 1
    assert (value(samples, "usable", gpu=0), value(samples, "usable", gpu=1)) == (1, 0)
    assert value(samples, "memory_used_bytes", gpu=1) is None
    host.set(1, lost=False)
    # MIG devices replace their GPU.
    devices = host.mig(0, [5 * GIB, 10 * GIB])
    samples = scrape()
    assert value(samples, "gpus") == 3
    assert (value(samples, "usable", uuid=host.uuids[0]), value(samples, "usable", gpu=1)) == (None, 1)
    assert [value(samples, "usable", gpu=0, uuid=uuid) for uuid in devices] == [1, 1]
    assert [value(samples, "memory_total_bytes", uuid=uuid) for uuid in devices] == [5 * GIB, 10 * GIB]
    # The exporter also serves OpenMetrics.
    text = scrape.get(accept="application/openmetrics-text; version=1.0.0")
    names = {family.name for family in openmetrics.text_string_to_metric_families(text)}
    assert {"flower_gpu_workers_started", "flower_gpu_lease_wait_seconds"} <= names
    scrape.process.send_signal(signal.SIGINT)
    assert scrape.process.wait(60) == 128 + signal.SIGINT
    assert scrape.process.stderr is not None and scrape.process.stderr.read() == ""


def test_without_gpus_and_ledger_the_rest_is_served(shell: Shell, tmp_path: Path) -> None:
    shell.ledger.rmdir()
    with run_of(shell, tmp_path / "runs" / "one") as trace:
        trace.worker("a", "ok")
        scrape = Exporter(shell)
        for _ in range(2):
            samples = scrape()
            assert value(samples, "gpus") == 0
            assert value(samples, "ledger_up") == 0
            assert value(samples, "leases_held") is None
            assert value(samples, "workers_finished_total", outcome="ok") == 1
    shell.ledger.mkdir()
    shell.ledger.chmod(0o1777)
    assert value(scrape(), "leases_held") == 0
    scrape.process.terminate()
    assert scrape.process.wait(60) == 128 + signal.SIGTERM
    assert scrape.process.stderr is not None
    # The warning is written once, not for each response.
    (warning,) = scrape.process.stderr.read().splitlines()
    assert "the ledger cannot be read" in warning and str(shell.ledger) in warning


def test_metrics_of_a_run(shell: Shell, tmp_path: Path) -> None:
    with run_of(shell, tmp_path / "runs" / "one", "digits", "simulate") as trace:
        trace.write("run_started", host="another host", num_rounds=5)
        trace.worker("a")
        trace.worker("b")
        trace.write("task_started", call="b", pid=1, client="3")
        trace.worker("c", round=2)
        trace.write("task_started", call="c", pid=1, client="3")
        trace.worker("d")
        trace.write("task_started", call="d", pid=1, client="3")
        trace.write("worker_result", call="d", pid=1, client="3")
        trace.write("lease_granted", call="b", waited_s=0.3)
        trace.write("lease_granted", call="b", waited_s=20)
        trace.write("lease_not_granted", call="c", waited_s=5)
        trace.write("out_of_memory", call="a", then="on the CPU")
        metrics = {"accuracy": 0.5, "nan": float("nan"), "text": "0.5", "flag": True, "list": [1.0]}
        trace.write("round_finished", round=1, task="evaluate", metrics=metrics)
        scrape = Exporter(shell)
        samples = scrape()
        phases = {phase: value(samples, "workers", run="one", phase=phase) for phase in
                  ("starting", "running", "exiting")}  # fmt: skip
        assert phases == {"starting": 1, "running": 2, "exiting": 1}
        assert value(samples, "runs", kind="simulate") == 1
        assert value(samples, "run_info", run="one", kind="simulate", app="digits") == 1
        assert (value(samples, "run_round", run="one"), value(samples, "run_rounds", run="one")) == (2, 5)
        assert value(samples, "evaluation", run="one", task="evaluate", metric="accuracy") == 0.5
        assert len([name for name, _ in samples if name == "flower_gpu_evaluation"]) == 1
        assert value(samples, "evaluation_round", run="one", task="evaluate") == 1
        assert value(samples, "rounds_finished_total") == 1
        assert value(samples, "out_of_memory_total", then="on the CPU") == 1
        assert value(samples, "leases_granted_total") == value(samples, "lease_wait_seconds_count") == 2
        assert value(samples, "leases_not_granted_total") == 1
        assert value(samples, "lease_wait_seconds_sum") == 20.3
        assert value(samples, "lease_wait_seconds_bucket", le="0.5") == 1
        assert value(samples, "lease_wait_seconds_bucket", le="+Inf") == 2
        trace.write("round_finished", round=2, task="evaluate", metrics={"loss": 0.25})
    # The run ends between two scrapes, so its last metrics are served once more.
    samples = scrape()
    assert value(samples, "evaluation", run="one") == 0.25
    assert value(samples, "runs", kind="simulate") == 0
    assert [value(samples, "workers", phase=phase) for phase in phases] == [0, 0, 0]
    assert not [key for key in scrape() if dict(key[1]).get("run")]


def test_arbitrary_names_do_not_break_the_exposition_format(shell: Shell, tmp_path: Path) -> None:
    with run_of(shell, tmp_path / "runs" / 'a "run"\n', name="\ud800\\") as trace:
        trace.write("round", round=1, metrics={'x"} 1\nflower_gpu_gpus 99\n': 4.0})
        trace.write("round", round=10**400, num_rounds=10**400, metrics={"loss": 1.0})
        trace.write(
            "round", round=1, metrics={"\ud800": 1.0, "\x00": 2.0, "huge": 10**400, "long" * 100: 3.0}
        )
        scrape = Exporter(shell)
        samples = scrape()
        assert value(samples, "gpus") == 0
        assert value(samples, "evaluation", metric='x"} 1?flower_gpu_gpus 99?') == 4.0
        assert value(samples, "evaluation", metric=r"\ud800") == 1.0
        assert value(samples, "evaluation", metric="?") == 2.0
        assert len([name for name, _ in samples if name == "flower_gpu_evaluation"]) == 4
        assert scrape.process.poll() is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--port 65536", "--port: must be a whole number, 0 to 65535, not '65536'"),
        ("--port 0 --address 192.0.2.1", "cannot listen on --address 192.0.2.1 --port 0: "),
        ("--port 0 --address nosuchname", "cannot listen on --address nosuchname --port 0: "),
        (f"--port 0 --address {'.' * 300}", "cannot listen on --address ..."),
        ("--port TAKEN", ": Address already in use. Take another, or --port 0\n"),
    ],
)
def test_an_unusable_address_is_an_error(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    # argparse raises SystemExit.
    with socket.create_server(("127.0.0.1", 0)) as server, suppress(SystemExit):
        port = str(server.getsockname()[1])
        assert cli.main(["metrics", *arguments.replace("TAKEN", port).split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith("flower-gpu metrics: ") and message in error and error.count("\n") == 1


# The table --------------------------------------------------------------------------------------------------


def name_of(row: MetricRow) -> str:
    return f"{PREFIX}{row.name}{'_total' if row.kind == 'counter' else ''}"


def test_served_types_and_help_texts_match_the_documentation() -> None:
    registry = CollectorRegistry()
    registry.register(Collector(partial(look_at_host, 1.0, 0), list))
    text = generate_latest(registry).decode()
    rows = [
        (name_of(row), row.kind, ", ".join(f"`{label}`" for label in row.labels), row.help)
        for row in METRICS.values()
    ]
    helps = [(name, text) for name, _, _, text in rows]
    assert re.findall(r"^# HELP (\S+) (.+)$", text, re.MULTILINE) == helps
    kinds = [(name, kind) for name, kind, _, _ in rows]
    assert re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE) == kinds
    pattern = r"^\| `(flower_gpu_\w+)` \| (\w+) \| (.*?) ?\| (.+) \|$"
    assert re.findall(pattern, PAGE.read_text(), re.MULTILINE) == rows


def test_the_documentation_lists_the_options_of_the_command() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    COMMAND.add_arguments(parser)
    rows = dict(re.findall(r"^\| `(--[a-z-]+)(?: \w+)?` \| (.+) \|$", PAGE.read_text(), re.MULTILINE))
    assert rows == {action.option_strings[0]: action.help for action in parser._actions}


def test_examples_in_the_documentation_use_existing_metrics() -> None:
    blocks = re.findall(r"```(?:text|yaml)\n(.*?)```", PAGE.read_text(), re.DOTALL)
    named = set(re.findall(r"flower_gpu_\w+", " ".join(blocks)))
    assert len(named) >= 4
    assert named <= {name_of(row) for row in METRICS.values()} | {"flower_gpu_lease_wait_seconds_bucket"}
