"""Declared packages that are not installed are named, together with the command to install them."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path

import pytest

from flower_gpu.apps.app import FlowerApp
from flower_gpu.apps.dependencies import (
    missing_packages_named,
    missing_packages_note,
    missing_packages_text,
)

ABSENT = "absent-distribution>=1.2"
TEXT = f"my-app declares {ABSENT}, which is not installed: pip install '{ABSENT}'"


def app(folder: Path, dependencies: object, client: str = "") -> FlowerApp:
    package = folder / "my_app"
    package.mkdir()
    (package / "server_app.py").write_text("import json\n")
    (package / "client_app.py").write_text(client)
    (folder / "pyproject.toml").write_text(
        f'[project]\nname = "my-app"\ndependencies = {json.dumps(dependencies)}\n'
        '[tool.flwr.app.components]\nserverapp = "my_app.server_app:app"\n'
        'clientapp = "my_app.client_app:app"\n'
    )
    return FlowerApp.load(folder)


def test_packages_that_are_installed_or_for_other_platforms_are_not_missing(tmp_path: Path) -> None:
    # Modules that another package provides count: flwr-nightly provides those of flwr.
    others = ["numpy", "flwr[simulation]>=1", "run-programs", "absent ; sys_platform == 'win32'", "no name!"]
    assert missing_packages_text(app(tmp_path, [*others, ABSENT])) == TEXT


def test_several_missing_packages_are_named_together(tmp_path: Path) -> None:
    text = missing_packages_text(app(tmp_path, ["absent-one", "absent-two>2"]))
    assert text == (
        "my-app declares absent-one, absent-two>2, which are not installed: pip install absent-one "
        "'absent-two>2'"
    )


@pytest.mark.parametrize("client", ["import absent_module.inner", "def train():\n    import absent_module"])
def test_a_missing_module_of_the_app_is_noticed_before_it_runs(tmp_path: Path, client: str) -> None:
    assert missing_packages_note(app(tmp_path, [ABSENT], client)) == TEXT


@pytest.mark.parametrize("dependencies", [[], ["numpy"], "not a list", [1]])
def test_a_missing_module_that_is_not_declared_has_no_note(tmp_path: Path, dependencies: object) -> None:
    assert missing_packages_note(app(tmp_path, dependencies, "import absent_module")) == ""


def test_a_declared_package_that_is_not_imported_has_no_note(tmp_path: Path) -> None:
    assert missing_packages_note(app(tmp_path, [ABSENT], "import numpy")) == ""


def test_the_error_of_an_import_names_the_package_once(tmp_path: Path) -> None:
    folder = app(tmp_path, [ABSENT]).path
    with (
        pytest.raises(ModuleNotFoundError) as caught,
        missing_packages_named(folder),
        missing_packages_named(folder),
    ):
        import_module("absent_module")
    assert str(caught.value) == f"No module named 'absent_module'. {TEXT}"
    assert caught.value.name == "absent_module"


@pytest.mark.parametrize("has_folder", [False, True])
def test_an_error_without_a_readable_app_is_unchanged(tmp_path: Path, has_folder: bool) -> None:
    folder = tmp_path if has_folder else None
    with (
        pytest.raises(ModuleNotFoundError, match=r"^No module named 'absent_module'$"),
        missing_packages_named(folder),
    ):
        import_module("absent_module")
