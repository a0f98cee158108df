"""A simulation names the declared package that an app lacks, wherever the app imports it."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_programs import run_cli
from scripted_app import copy_of_app

from flower_gpu import simulate

pytestmark = pytest.mark.timeout(180)

DECLARED = "absent-distribution>=1.2"
TEXT = f"scripted declares {DECLARED}, which is not installed: pip install '{DECLARED}'"


@pytest.fixture
def app(tmp_path: Path) -> Path:
    """A copy of an app that declares a package that does not exist."""
    folder = copy_of_app(tmp_path / "app")
    file = folder / "pyproject.toml"
    file.write_text(file.read_text().replace("dependencies = []", f'dependencies = ["{DECLARED}"]'))
    return folder


def test_a_late_import_in_a_client_names_the_package(app: Path) -> None:
    file = app / "scripted/client_app.py"
    file.write_text(
        file.read_text().replace("    time.sleep(config", "    import absent_module\n    time.sleep(config")
    )
    done = run_cli("simulate", app, "--clients", "2", "--rounds", "1", cwd=app.parent)
    assert done.returncode == 1
    assert f"note: {TEXT}\n" in done.stderr
    reason = f"ModuleNotFoundError: No module named 'absent_module'. {TEXT}"
    (log,) = app.parent.glob("runs/*/failures.log")
    assert reason in log.read_text() and reason in done.stderr


def test_an_import_in_the_server_names_the_package(
    app: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(app)
    package = app / "scripted"
    # Another test may have imported the app.
    package.rename(app / "other")
    pyproject = app / "pyproject.toml"
    pyproject.write_text(pyproject.read_text().replace('"scripted.', '"other.'))
    file = app / "other/server_app.py"
    file.write_text(f"import absent_module\n{file.read_text()}")
    with pytest.raises(ModuleNotFoundError) as caught:
        simulate(app, 1, log_dir=None, progress=False)
    assert str(caught.value) == f"No module named 'absent_module'. {TEXT}"
