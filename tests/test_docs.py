"""The links, tables, options and code of the documentation match the package."""

from __future__ import annotations

import argparse
import importlib
import re
from pathlib import Path

import pytest
from run_programs import run

from flower_gpu import errors, simulate
from flower_gpu.apps.folder import RunFolder
from flower_gpu.cli import watching
from flower_gpu.cli.main import build_parser
from flower_gpu.launch.federation import client_environment, service_environment
from flower_gpu.options import CALL, INTERNAL_VARIABLES, SCRIPT_VARIABLES, START_METHODS, VARIABLES, Option
from flower_gpu.simulation.options import OPTIONS

REPOSITORY = Path(__file__).parents[1]
PAGES = [
    *REPOSITORY.glob("*.md"),
    *(REPOSITORY / "docs").rglob("*.md"),
    *(REPOSITORY / "examples").rglob("*.md"),
    *(REPOSITORY / "benchmarks").rglob("*.md"),
    REPOSITORY / "flower_gpu/README.md",
]


def read(page: str) -> str:
    return (REPOSITORY / page).read_text()


def headings(text: str) -> set[str]:
    """Return the anchors that GitHub makes for the headings of a page."""
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_links_resolve(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        linked = page.parent / path if path else page
        assert linked.exists(), f"{page.name} links to {target}"
        if anchor:
            assert anchor in headings(linked.read_text()), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", [*PAGES, REPOSITORY / ".ci" / "run"], ids=lambda page: page.parent.name)
def test_files_of_tests_and_benchmarks_that_are_named_exist(page: Path) -> None:
    text = page.read_text()
    for name in re.findall(r"(?<![\w/.])tests/[\w/]*\*?\w*\.(?:py|sh)", text):
        assert list(REPOSITORY.glob(name)), f"{page.name} names {name}"
    for name in re.findall(r"python -m benchmarks\.(\w+)", text):
        assert (REPOSITORY / "benchmarks" / name / "__main__.py").exists(), f"{page.name} names {name}"


def test_each_attack_has_a_test_or_says_that_it_has_none() -> None:
    table = read("docs/explanation/security.md").partition("\n## Attacks\n")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("| ")][2:]
    assert len(rows) > 20
    for *_, tests in rows:
        named = re.findall(r"`(tests/[^`]+)`", tests)
        assert named or tests.strip() == "no test", tests
        for path in named:
            assert (REPOSITORY / path).exists(), path


def test_names_imported_by_scripts_in_tests_and_pages_exist() -> None:
    """Linters do not check code in strings."""
    files = [*PAGES, *(REPOSITORY / "tests").rglob("*.py"), *(REPOSITORY / "benchmarks").rglob("*.py")]
    imports = {
        (module, name.partition(" as ")[0].strip())
        for file in files
        for module, names in re.findall(
            r"^ *from (flower_gpu[\w.]*) import ([\w, ]+)", file.read_text(), re.M
        )
        for name in names.split(",")
        if name.strip()
    }
    missing = []
    for module, name in sorted(imports):
        try:
            if not hasattr(importlib.import_module(module), name):
                importlib.import_module(f"{module}.{name}")
        except ModuleNotFoundError as error:
            # Optional libraries such as JAX may be missing.
            if (error.name or "").startswith("flower_gpu"):
                missing.append(f"{module}: {name}")
    assert not missing


def test_every_page_can_be_reached_from_the_readme() -> None:
    seen, todo = set(), [REPOSITORY / "README.md"]
    while todo:
        page = todo.pop().resolve()
        if page in seen or page.suffix != ".md":
            continue
        seen.add(page)
        for target in re.findall(r"\]\(([^)\s#]+)", page.read_text()):
            if not target.startswith("http"):
                todo.append(page.parent / target)
    missing = {page.resolve() for page in (REPOSITORY / "docs").rglob("*.md")} - seen
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_python_examples_compile(page: Path) -> None:
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        compile(block, str(page), "exec")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_bash_can_parse_shell_examples(page: Path) -> None:
    text = "\n".join(re.findall(r"```bash\n(.*?)```", page.read_text(), re.DOTALL))
    text = re.sub(r"<[\w ]+>", "PLACEHOLDER", text)
    done = run(["bash", "-n"], input=text)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_table_of_variables_matches_the_code() -> None:
    page = read("docs/reference/environment.md").partition("\n## The variables\n")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `\w+` \| .+ \|$", page, re.MULTILINE) == [
        f"| `{name}` | {meaning(option)} | {default(option)} |" for name, option in VARIABLES.items()
    ]


def meaning(option: Option) -> str:
    return re.sub(r" \(default: .*\)$", "", option.described).replace("|", r"\|")


def default(option: Option) -> str:
    value = f"{option.default:g}" if isinstance(option.default, float) else option.default
    return "" if value is None else f"`{value}`"


def test_the_options_of_calls_match_the_code() -> None:
    _, _, page = read("docs/reference/python.md").partition("\n## Options that all of them take")
    rows = dict(re.findall(r"^\| `(\w+)` \|.*\| (.+) \|$", page, re.MULTILINE))
    assert rows.keys() == CALL.keys()
    for name, option in CALL.items():
        assert not option.variable or f"`{option.variable}`" in rows[name]


def test_the_options_of_simulations_match_the_code() -> None:
    _, _, page = read("docs/reference/python.md").partition("\n### Options of `simulate`")
    rows = dict(re.findall(r"^\| `(\w+)` \|.*\| (.+) \|$", page.partition("\n## ")[0], re.MULTILINE))
    assert rows.keys() == OPTIONS.keys()
    for name, option in OPTIONS.items():
        assert default(option) in rows[name]
        # The help of the function has every option, too.
        assert f"\n{name}\n    {option.described_in_code}" in (simulate.__doc__ or "")


def test_a_default_is_the_same_in_help_and_pages() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \|(.+)$", read("docs/reference/python.md"), re.M))
    for name, option in CALL.items():
        if option.default is not None:
            value = default(option).strip("`")
            for text in (option.described, rows[name]):
                assert re.search(rf"\b{value}\b", text), (name, text)
    # Pages also name the longest wait in sentences.
    variable = "FLOWER_GPU_LEASE_TIMEOUT_S"
    lines = [line for page in PAGES for line in page.read_text().splitlines() if variable in line]
    seconds = re.findall(r"\b\d+(?= s\b)", " ".join(lines))
    assert seconds and set(seconds) == {default(VARIABLES[variable]).strip("`")}, seconds


def test_pages_use_the_same_words_for_the_same_thing() -> None:
    texts = {page: page.read_text() for page in PAGES if page.name != "CHANGELOG.md"}
    every = "\n".join(texts.values())
    assert set(re.findall(r"FLOWER_GPU_LEDGER_DIR=(\S+)", every)) == {"/var/tmp/leases"}
    port = watching.METRICS.options["port"].default
    assert set(re.findall(r"(?:--port |127\.0\.0\.1:)(9[45]\d\d)\b", every)) == {str(port)}


def test_install_commands_on_pages_need_no_published_package() -> None:
    for page in PAGES:
        for block in re.findall(r"```bash\n(.*?)```", page.read_text(), re.DOTALL):
            for line in block.splitlines():
                assert not re.search(r"(pip|git) .*(<|'flower-gpu\b)", line), f"{page.name}: {line}"
    first = re.findall(r"```bash\n(.*?)```", read("README.md"), re.DOTALL)[0]
    assert first.startswith("./run.sh "), "the package has no address yet"


def test_the_readme_shows_the_figures_of_the_page_on_supernodes() -> None:
    ordinary = r"^\| 6, an ordinary app.* \| 158 s \| (\d+ s) \| ([\d.]+ s) \|"
    figures = re.search(ordinary, read("docs/how-to/supernodes.md"), re.M)
    assert figures is not None
    assert f"| {figures[2]} with `flower-gpu launch`, {figures[1]} with `flower-gpu supernode` |" in read(
        "README.md"
    )


def test_the_variables_that_launch_sets_are_documented(tmp_path: Path) -> None:
    _, _, page = read("docs/reference/environment.md").partition("\n## Which folder")
    documented: dict[str, bool] = {}
    for names, yours_wins in re.findall(r"^\| (`.+?`) \|.*\| (yes|no) \|$", page, re.MULTILINE):
        documented |= dict.fromkeys(re.findall(r"\w+", names), yours_wins == "yes")
    folder = RunFolder(tmp_path)
    variables = client_environment(service_environment({}, folder), 3, concurrency=4)
    assert set(variables) == {*documented, "PATH", "NO_PROXY", "no_proxy"}
    users = client_environment(
        service_environment(dict.fromkeys(documented, "mine"), folder), 3, concurrency=4
    )
    assert {name for name, value in users.items() if value == "mine"} == {
        name for name, wins in documented.items() if wins
    }


def test_every_variable_that_is_read_or_documented_is_in_a_table() -> None:
    scripts = [*REPOSITORY.glob("*.sh"), *(REPOSITORY / "scripts").glob("*.*"), REPOSITORY / "hatch_build.py"]
    # The changelog may contain names that no longer exist.
    pages = [page for page in PAGES if page.name != "CHANGELOG.md"]
    used = set()
    for file in [*(REPOSITORY / "flower_gpu").rglob("*.py"), *scripts, *pages]:
        used |= set(re.findall(r"FLOWER_GPU_[A-Z_]+\b", file.read_text()))
    # A page shows the doctor's finding for this misspelt name.
    misspelt = {"FLOWER_GPU_RESERV"}
    assert used - misspelt == {*VARIABLES, *INTERNAL_VARIABLES, *SCRIPT_VARIABLES}
    _, _, page = read("docs/reference/environment.md").partition("\n## Of a clone's scripts\n")
    assert dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", page.partition("\n## ")[0], re.M)) == SCRIPT_VARIABLES


@pytest.mark.parametrize("command", ["launch", "simulate", "supernode"])
def test_reference_has_every_option(command: str) -> None:
    page = read(f"docs/reference/{command}.md")
    parser = build_parser()._subparsers._group_actions[0].choices[command]  # type: ignore[union-attr,index]
    for action in parser._actions:
        if action.help == argparse.SUPPRESS:
            continue
        for option in action.option_strings:
            assert re.search(rf"(?m)^  (-\w, )?{option}\b", page) or f" {option}" in page, option
        # The words must be the same, but line breaks may differ.
        if action.help and "%" not in action.help:
            assert action.help in re.sub(r"\s+", " ", page), action.option_strings
    # The reference also has the text of each option group, and of the values of --gpu.
    for group in parser._action_groups:
        for line in (group.description or "").splitlines():
            assert f"\n  {line}\n" in page, line
    assert re.search(r"--gpu is one of:\n    never .+\n    offer .+\n    force .+\n    require .+\n", page)


def test_the_reference_of_errors_matches_the_code() -> None:
    page = read("docs/reference/python.md")
    for name, kind in vars(errors).items():
        if isinstance(kind, type) and not kind.__subclasses__():
            assert f"| `{name}` |" in page


def test_start_method_table_has_every_method() -> None:
    page = read("docs/explanation/isolation.md")
    rows = set(re.findall(r"^\| `([\w-]+)` \|", page, re.MULTILINE))
    assert rows == set(START_METHODS) - {"auto"}


@pytest.mark.parametrize("name", ["flwr", "torch"])
def test_the_readme_names_the_lowest_versions_of_the_metadata(name: str) -> None:
    lowest = re.search(rf'"{name}>=([\d.]+)', read("pyproject.toml"))
    assert lowest and f"{name} {lowest[1]} (the lowest)" in read("README.md")
