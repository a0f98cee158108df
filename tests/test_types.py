"""Type checkers find wrong options in users' code, and the types say what the table of options says."""

from __future__ import annotations

import re
import shutil
import sys
from numbers import Real
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from run_programs import run

from flower_gpu import CallOptions, gpu_client, run_in_worker, simulate
from flower_gpu.options import CALL

USER_FILE = Path(__file__).parent / "typed_user.py"

# Only the signatures of what users call are of interest, not what lies behind them.
MYPY_CONFIG = """
[mypy]
[mypy-flower_gpu.*,flwr.*,torch.*,numpy.*]
follow_imports = skip
follow_imports_for_stubs = True
ignore_missing_imports = True
[mypy-flower_gpu,flower_gpu.options,flower_gpu.calls.runner,flower_gpu.flower.client,flower_gpu.flower.evaluate]
follow_imports = silent
[mypy-flower_gpu.flower.mod,flower_gpu.ranks.function,flower_gpu.simulation.options,flower_gpu.simulation.run]
follow_imports = silent
"""


@pytest.mark.timeout(180)
@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_wrong_options_are_found(checker: str, tmp_path: Path) -> None:
    if checker == "pyright":
        pytest.importorskip("pyright")
        if shutil.which("node") is None:
            pytest.skip("pyright runs in node, which is not installed here")
        command = ["pyright", "--pythonpath", sys.executable]
    else:
        (tmp_path / "mypy.ini").write_text(MYPY_CONFIG)
        command = ["mypy", "--config-file", "mypy.ini", "--cache-dir", str(tmp_path / "cache")]

    shutil.copy(USER_FILE, tmp_path / "user.py")
    done = run([sys.executable, "-m", *command, "user.py"], cwd=tmp_path, timeout_s=175)

    found = {int(line) for line in re.findall(r"user\.py:(\d+):.*\berror\b", done.stdout)}
    lines = USER_FILE.read_text().splitlines()
    wrong = {number for number, line in enumerate(lines, start=1) if line.endswith("# wrong")}
    assert len(wrong) == 20
    assert found == wrong, done.stdout + done.stderr
    assert "num_gpu" in done.stdout and "'retyr'" in done.stdout


@pytest.mark.parametrize("name", CALL)
def test_the_type_of_an_option_is_what_its_kind_takes(name: str) -> None:
    hints = set(get_args(get_type_hints(CallOptions)[name])) - {type(None)}
    kind = CALL[name].kind
    if kind is None:
        return
    if kind.words:
        [words] = hints
        assert get_args(words) == kind.words
    else:
        # For type checkers a float may be an int; for users any real number is one.
        assert set(kind.types) <= hints | ({int, Real} if hints & {int, float} else set())


def test_functions_name_words_as_the_options_do() -> None:
    options = get_type_hints(CallOptions)
    for takes_options in (gpu_client, run_in_worker):
        named = {name: hint for name, hint in get_type_hints(takes_options).items() if name in options}
        assert named == {name: options[name] for name in ("start_method", "gpu", "on_oom")}
    assert get_type_hints(simulate)["options"].__args__ == (CallOptions,)
