"""CONTRIBUTING.md matches the code, and the configuration files of the repository are valid."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from flower_gpu.options import TRACKERS
from flower_gpu.watch.trackers import adapters

REPOSITORY = Path(__file__).parents[1]
PAGE = (REPOSITORY / "CONTRIBUTING.md").read_text()
LISTS = re.findall(r"^### (.+), as (.+)\n\n((?:[- ].+\n)+)", PAGE, re.MULTILINE)


@pytest.mark.parametrize(("what", "examples", "places"), LISTS, ids=[entry[0] for entry in LISTS])
def test_each_example_is_in_the_files_of_its_list(what: str, examples: str, places: str) -> None:
    names = re.findall(r"`(\w+)`", examples)
    words = [word for name in names for word in (name, name.lower(), name.replace("_", "-"))]
    missing = []
    for line in places.splitlines():
        if "only if" in line:
            continue
        variables = re.findall(r"as `(\w+)`", line)
        for path in re.findall(r"\]\(([^)]+)\)", line):
            text = (REPOSITORY / path).read_text()
            if not any(re.search(rf"\b{word}\b", text) for word in variables or words):
                missing.append(path)
    assert names and places.count("](") >= 3 and not missing


def test_there_is_a_list_for_each_kind() -> None:
    assert len(LISTS) == PAGE.count("\n### ") == 5


def test_names_in_the_lists_are_in_the_code() -> None:
    code = "".join(path.read_text() for path in (REPOSITORY / "flower_gpu").rglob("*.py"))
    for name in re.findall(r"`([A-Z]\w+)`", PAGE):
        assert re.search(rf"\b{name}\b", code), name


def test_names_in_the_map_are_in_the_files_that_it_links() -> None:
    for row in (REPOSITORY / "flower_gpu/README.md").read_text().splitlines():
        if row.startswith("|") and (links := re.findall(r"\]\(([^)]+)\)", row)):
            texts = " ".join((REPOSITORY / "flower_gpu" / link).read_text() for link in links)
            for name in re.findall(r"`([\w.]+)`", row):
                assert re.search(rf"\b{re.escape(name)}\b", texts), (name, row)


def test_the_tests_that_the_checks_name_exist() -> None:
    scripts = "".join((REPOSITORY / ".ci" / name).read_text() for name in ("run", "test_versions.sh"))
    words = re.findall(r"(?<![\w/])tests/[\w/{},*]+(?:\.py)?(?:::\w+)?", scripts)
    shown = [
        "bash",
        "-c",
        "printf '%s\\n' " + " ".join(word for word in words if word not in ("tests/run", "tests/nightly")),
    ]
    named = subprocess.check_output(shown, cwd=REPOSITORY, text=True).splitlines()
    assert len(named) > 30
    for path, _, test in (line.partition("::") for line in named):
        assert (REPOSITORY / path).is_file(), path
        assert not test or f"\ndef {test}(" in (REPOSITORY / path).read_text(), (path, test)


def test_each_tracker_of_the_options_has_a_class() -> None:
    assert tuple(adapters.ALL) == TRACKERS


def test_every_event_of_the_trace_is_documented() -> None:
    page = (REPOSITORY / "docs/reference/trace.md").read_text()
    code = "".join(path.read_text() for path in (REPOSITORY / "flower_gpu").rglob("*.py"))
    events = set(re.findall(r"trace\.(?:write|make)\(\s*\"(\w+)\"", code))
    events |= set(re.findall(r"trace\.write_to\(\s*[\w.]+,\s*\"(\w+)\"", code))
    assert len(events) > 10
    assert not {event for event in events if f"`{event}`" not in page}


def test_the_workflow_runs_all_checks_on_each_python_of_the_metadata() -> None:
    workflow = (REPOSITORY / ".github/workflows/ci.yml").read_text()
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    prefix = "Programming Language :: Python :: 3."
    classifiers = project["classifiers"]
    pythons = [entry.rpartition(" ")[2] for entry in classifiers if entry.startswith(prefix)]
    matrix = re.search(r"python: \[(.+)\]", workflow)
    assert matrix and re.findall(r"[\d.]+", matrix[1]) == pythons
    for command in (".ci/run", "scripts/site.sh"):
        assert f"- run: {command}" in workflow and (REPOSITORY / command).exists()
    assert "FLOWER_GPU_REPOSITORY" in workflow


def test_the_next_version_of_flower_is_tried_each_week() -> None:
    workflow = (REPOSITORY / ".github/workflows/nightly.yml").read_text()
    script = (REPOSITORY / "tests/nightly.sh").read_text()
    assert "cron:" in workflow and "- run: tests/nightly.sh" in workflow
    assert "install --pre flwr-nightly\n" in script and "\ntest_versions " in script


def test_the_citation_has_the_version_and_the_licence_of_the_package() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    citation = (REPOSITORY / "CITATION.cff").read_text()
    for key, value in (
        ("version", project["version"]),
        ("license", project["license"]),
        ("title", project["name"]),
    ):
        assert re.search(rf"(?m)^{key}: {re.escape(value)}$", citation), key
    assert f"- name: {project['authors'][0]['name']}" in citation
