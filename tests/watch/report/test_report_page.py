"""The page of a report: any trace gives a valid page, and the page has the expected contents."""

from __future__ import annotations

import json
import random
import re
import tempfile
import time
import xml.etree.ElementTree
from pathlib import Path
from typing import Any

import pytest
from html_page import Page
from hypothesis import given, settings
from hypothesis import strategies as st
from properties import examples
from report_traces import Run, at, history_of, on_hosts, write
from top_snapshots import snapshot

from flower_gpu import trace
from flower_gpu.apps.folder import RunFolder
from flower_gpu.apps.recording import recorded_run
from flower_gpu.cli import main as cli
from flower_gpu.errors import ConfigError
from flower_gpu.gpu.gpus import Inventory
from flower_gpu.watch.followed_run import FollowedRun
from flower_gpu.watch.host_look import Seen
from flower_gpu.watch.report import page as report
from flower_gpu.watch.report.calls import RunClock, tries_of
from flower_gpu.watch.result import result_of, write_results
from flower_gpu.watch.top.snapshot import run_row, waiting_rows, worker_rows
from flower_gpu.watch.top.view import Size, draw

#: A run with all features: claims that wait, failures, several rounds and a worker without a reported end.
RICH = Run(clients=7, gpus=2, rounds=3, lease_gib=7.0, failing=0.3, lost=0.05, seed=3)


class ReportPage(Page):
    """A report, with its pictures and charts."""

    @property
    def pictures(self) -> list[xml.etree.ElementTree.Element]:
        """The pictures with a time axis, without their legends."""
        return self._svg_elements(r'<svg height=\S+ class="picture".*?</svg>(?=</div>)')

    @property
    def charts(self) -> list[xml.etree.ElementTree.Element]:
        """The charts of metrics."""
        return self._svg_elements(r'<svg viewBox="[^"]*" class="chart".*?</svg>')

    def _svg_elements(self, pattern: str) -> list[xml.etree.ElementTree.Element]:
        texts = re.findall(pattern, self.text, re.DOTALL)
        return [xml.etree.ElementTree.fromstring(text) for text in texts]

    @property
    def plain(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.words))

    def has(self, text: str) -> bool:
        return text in self.plain


def page_of(folder: Path) -> ReportPage:
    return ReportPage(report.write_report(folder).read_text(encoding="utf-8"))


def texts_of(picture: xml.etree.ElementTree.Element) -> list[str]:
    return [element.text or "" for element in picture.iter("text")]


def classes_of(picture: xml.etree.ElementTree.Element) -> set[str]:
    return {word for element in picture.iter() for word in (element.get("class") or "").split()}


def headings(page: ReportPage) -> list[str]:
    return re.findall(r"<h2>(.*?)</h2>", page.text)


@pytest.fixture(scope="module")
def rich_trace(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The trace of the rich run on two hosts, of which one is lost."""
    events = on_hosts(RICH.events(), 2, lost_at=6.0)
    return write(tmp_path_factory.mktemp("rich"), events).read_bytes()


# Any trace.


def test_a_page_is_complete_and_loads_no_other_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "run", RICH.events())
    assert cli.main(["report", str(tmp_path / "run"), "--output", str(tmp_path / "mine.html")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'mine.html'}\n"
    page = ReportPage((tmp_path / "mine.html").read_text(encoding="utf-8"))
    tables = ["Sums", "Failures", "GPUs", "Rounds", "Clients", "Run"]
    assert headings(page) == ["Metrics", "Workers", "GPU memory", *tables]
    assert page.text.index('class="chart"') < page.text.index('class="picture"')
    names = ["accuracy", "loss", "train_loss", "f1", "num-examples"]
    assert [texts_of(chart)[0] for chart in page.charts] == names
    assert [len(list(chart.iter("circle"))) for chart in page.charts] == [3] * len(names)
    assert "server-evaluate" in classes_of(page.charts[0]) and "train" in classes_of(page.charts[2])
    workers, memory = page.pictures
    assert {"waiting", "starting", "running", "exiting", "failed", "no-end"} <= classes_of(workers)
    assert {"c0", "c6", "used", "limit", "before"} <= classes_of(memory)
    assert "GPU 1, NVIDIA A100" in texts_of(memory)
    assert page.has("digits") and page.has("flower-gpu simulate") and page.has("node7")
    assert page.has("completed") and page.has("3 of 3")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["trace.jsonl"]
    assert not [
        attributes for _, attributes in page.elements if {"src", "srcset", "href"} & attributes.keys()
    ]
    assert not {"script", "link", "iframe", "object", "img"} & {tag for tag, _ in page.elements}
    assert not re.search(r"@import|url\(", page.text)


def test_a_cut_line_is_skipped_and_reported(tmp_path: Path) -> None:
    path = write(tmp_path, Run(clients=2, seed=3).events())
    whole_number = path.read_bytes()
    assert not page_of(tmp_path).has("cut, and left out")
    path.write_bytes(whole_number[:-20])
    page = page_of(tmp_path)
    assert page.has("1 line cut, and left out") and page.has("no end in the trace")


@settings(max_examples=examples(25))
@given(cut=st.integers(0, 100_000), other=st.integers(0, 100_000))
def test_a_trace_with_a_missing_part_is_shown(rich_trace: bytes, cut: int, other: int) -> None:
    begin, end = sorted((cut % len(rich_trace), other % len(rich_trace)))
    check_sums(parsed(rich_trace[:begin] + rich_trace[end:]))


@settings(max_examples=examples(25))
@given(seed=st.integers(0, 1 << 30), probability=st.sampled_from([0.002, 0.02, 0.2]))
def test_a_trace_with_arbitrary_values_is_shown(rich_trace: bytes, seed: int, probability: float) -> None:
    draw = random.Random(seed)
    check_sums([corrupted(event, draw, probability) for event in parsed(rich_trace)])


def parsed(data: bytes) -> list[dict[str, Any]]:
    return [event for line in data.splitlines() if (event := trace.parse(line)) is not None]


ANYTHING = [10**400, 10**30, -5, 1e300, -1e300, float("nan"), None, True, 0, "", "\ud800", [], {}, [{}]]


def corrupted(value: Any, draw: random.Random, probability: float) -> Any:
    """Replace some of the values with arbitrary ones."""
    if isinstance(value, dict):
        unchanged = ("v", "event")
        return {
            name: draw.choice(ANYTHING)
            if name not in unchanged and draw.random() < probability
            else corrupted(item, draw, probability)
            for name, item in value.items()
        }
    return [corrupted(item, draw, probability) for item in value] if isinstance(value, list) else value


def check_sums(events: list[dict[str, Any]]) -> None:
    history = history_of(events)
    page = ReportPage(report.page(history, folder="f", is_going_on=False))
    assert page.text.endswith("</html>\n") and all(texts_of(call) for call in page.pictures)
    clock = RunClock.of(history)
    for call in tries_of(history, clock):
        assert all(0 <= part.seconds <= clock.duration_s for part in call.parts)
    with tempfile.TemporaryDirectory() as folder:
        write_results(RunFolder(Path(folder)), history.rounds.parts, result_of(history))
        check_top(Path(folder), events)


def check_top(folder: Path, events: list[dict[str, Any]]) -> None:
    """Check that the live view can show the run of this trace."""
    run, seen = FollowedRun(folder), Seen(time.time(), Inventory((), None, "no driver"))
    run.history.feed(events)
    rows = {
        "runs": (run_row(seen, run),),
        "workers": worker_rows(seen, [run], others=True),
        "waiting": waiting_rows(seen, [run]),
    }
    shown = snapshot(gpus=(), gpu_problem="no driver", **rows)
    json.dumps(shown.as_json())
    assert all(line.plain.isprintable() for line in draw(shown, Size(100)))


def test_a_run_without_a_gpu(tmp_path: Path) -> None:
    fields = {"call": "c", "client": "0", "task": "fit", "round": 1, "pid": 5, "start_method": "fork"}
    events = [
        at(0, "run_started", kind="launch", name="app", clients=1, num_rounds=1, host="n", cores=2, gpus=[]),
        at(1, "worker_started", **fields),
        at(3, "worker_finished", **fields, task_at=None, result_at=None, outcome="ok", error=None),
        at(4, "run_finished", outcome="completed", seconds=4),
    ]
    write(tmp_path, events)
    page = page_of(tmp_path)
    assert headings(page) == ["Workers", "Sums", "Clients", "Run"]
    assert page.has("GPUs none")


def test_hosts_of_a_cluster(tmp_path: Path) -> None:
    write(tmp_path, on_hosts(Run(clients=12, gpus=4, lease_gib=7.0).events(), 2, lost_at=3.0))
    page = page_of(tmp_path)
    assert headings(page)[3:6] == ["Sums", "Hosts", "GPUs"]
    assert page.has("12 clients, 1 of 1 rounds, 2 hosts, 4 GPUs")
    assert re.search(r"\d ok, \d lost with a host no failure in any call", page.plain)
    assert re.search(r"node0 \d+ 0 \d+ [\d.]+ s 16 2 NVIDIA A100 0\.50 s - ", page.plain)
    assert re.search(r"node1 .* 16 2 NVIDIA A100 0\.50 s after 3\.00 s: The <actor> died ", page.plain)
    names = {f"GPU {number} on {host}" for number in (0, 1) for host in ("node0", "node1")}
    workers, memory = page.pictures
    assert names <= set(texts_of(workers)) and {f"{name}, NVIDIA A100" for name in names} <= set(
        texts_of(memory)
    )
    assert "host-lost" in classes_of(workers)


def test_thousands_of_workers(tmp_path: Path) -> None:
    """Each client has a row, and the pictures stay small enough for a browser."""
    write(tmp_path, Run(clients=2100, gpus=8, lease_gib=2, failing=0.01).events())
    page = page_of(tmp_path)
    assert sum(tag == "tr" for tag, _ in page.elements) > 2100
    assert sum(len(list(picture.iter())) for picture in page.pictures) < 2000


def test_texts_of_pictures_keep_their_size_on_a_phone(tmp_path: Path) -> None:
    """Only shapes are compressed with the time axis. Texts and marks are outside of the scaled element."""
    write(tmp_path, RICH.events())
    for picture in page_of(tmp_path).pictures:
        assert picture.get("viewBox") is None and picture.get("width") is None
        shapes = [element for element in picture if element.get("preserveAspectRatio") == "none"]
        assert len(shapes) == 1 and shapes[0].get("width") == "100%"
        scaled_tags = {element.tag for element in shapes[0].iter()}
        assert "rect" in scaled_tags and not {"text", "circle"} & scaled_tags
        assert not [element for element in shapes[0].iter() if "mark" in (element.get("class") or "").split()]
        positions = [element.get("x") or "" for element in picture.iter("text")]
        assert all(position.endswith("%") or float(position) <= 0 for position in positions)
        # A narrow screen hides every other number of the axis, but never the number with the unit.
        labels = [element for element in picture.iter("text") if (element.text or "").endswith(" s")]
        assert labels and not [element for element in labels if "wide-only" in (element.get("class") or "")]


# Texts from other accounts and apps.

NASTY = [
    "</td><script>alert(1)</script>",
    "$x^{$ \\frac",
    "\x1b[2J\x00\u202e",
    "_hidden",
    "\ud800",
    "個😀",
    "a" * 300,
]


def test_names_with_markup_are_escaped(tmp_path: Path) -> None:
    events = Run(clients=len(NASTY), names=NASTY, failing=0.5, rounds=2).events()
    for event in events:
        if event["event"] == "run_started":
            event |= {"name": NASTY[0], "host": NASTY[1], "version": NASTY[0]}
            event["gpus"][0]["name"] = NASTY[1] + NASTY[0]
        if event["event"] == "round":
            event["metrics"] = dict.fromkeys(NASTY, 0.5)
    write(tmp_path, events)
    page = page_of(tmp_path)
    assert "script" not in {tag for tag, _ in page.elements}
    assert not [name for _, attributes in page.elements for name in attributes if name.startswith("on")]
    assert page.has("<script>alert(1)</script>") and page.has("?[2J??") and page.has("_hidden")
    assert {letter for letter in page.text if not letter.isprintable()} == {"\n"}


# Contents.


def test_equal_failures_are_listed_once_with_a_folded_traceback(tmp_path: Path) -> None:
    write(tmp_path, Run(clients=30, failing=0.6, seed=2).events())
    page = page_of(tmp_path)
    assert re.search(r"[2-9] times error: ValueError: no <i>error</i> clients \d+, \d+", page.plain)
    folded = re.findall(
        r'<details class="failure"><summary>.*?<pre>\n(.*?)</pre></details>', page.text, re.DOTALL
    )
    assert folded == [
        "Traceback (most recent call last):\n  File &#34;task.py&#34;, line 3, in train\n    &lt;b&gt;?[2J\n"
    ]
    assert page.text.count("Traceback") == 1
    assert "bad" not in re.sub(r"<style>.*?</style>", "", page.text, flags=re.DOTALL)


# The command.


def test_a_report_replaces_the_previous_one(tmp_path: Path) -> None:
    with recorded_run(tmp_path, "launch", "the app"):
        assert page_of(tmp_path).has("still running when this report was made")
    assert page_of(tmp_path).has("completed")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "trace.jsonl"]


def test_unusable_folders_are_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(tmp_path)]) == 2
    assert re.fullmatch(
        r"flower-gpu report: \S+trace\.jsonl is not there: .*Give the folder of a run.*\n",
        capsys.readouterr().err,
    )
    write(tmp_path / "run", RICH.events()[:5])
    with pytest.raises(ConfigError, match="--output"):
        report.write_report(tmp_path / "run", tmp_path / "no/where.html")
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["trace.jsonl"]
