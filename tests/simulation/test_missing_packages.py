"""A simulation names the declared package that an app lacks, wherever the app imports it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from run_programs import run_cli
from simulations import APPS

from flower_gpu import simulate

pytestmark = pytest.mark.timeout(180)

DECLARED = "absent-distribution>=1.2"
TEXT = f"plain declares {DECLARED}, which is not installed: pip install '{DECLARED}'"


@pytest.fixture
def app(tmp_path: Path) -> Path:
    """A copy of an app that declares a package that does not exist."""
    folder = Path(shutil.copytree(APPS / "plain", tmp_path / "plain"))
    file = folder / "pyproject.toml"
    declared = f'version = "1.0.0"\ndependencies = ["{DECLARED}"]'
    file.write_text(file.read_text().replace('version = "1.0.0"', declared))
    return folder


def test_a_late_import_in_a_client_names_the_package(app: Path) -> None:
    file = app / "plain/client_app.py"
    file.write_text(
        file.read_text().replace("    partition = int(", "    import absent_module\n    partition = int(")
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
    package = app / "plain"
    # Another test may have imported the app.
    package.rename(app / "plain_server")
    pyproject = app / "pyproject.toml"
    pyproject.write_text(pyproject.read_text().replace('"plain.', '"plain_server.'))
    file = app / "plain_server/server_app.py"
    file.write_text(f"import absent_module\n{file.read_text()}")
    with pytest.raises(ModuleNotFoundError) as caught:
        simulate(app, 1, log_dir=None, progress=False)
    assert str(caught.value) == f"No module named 'absent_module'. {TEXT}"
