"""Type checkers find wrong options in users' code, and the types match the table of options."""

from __future__ import annotations

import re
import shutil
import sys
from numbers import Real
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from run_programs import run

from flower_gpu import CallOptions, SimulationOptions, gpu_client, run_in_worker, simulate
from flower_gpu.options import CALL

USER_FILE = Path(__file__).parent / "typed_user.py"


@pytest.mark.timeout(600)
def test_wrong_options_are_found(tmp_path: Path) -> None:
    """This test runs pyright. The type check of CI runs mypy on the same file."""
    pytest.importorskip("pyright")
    if shutil.which("node") is None:
        pytest.skip("pyright runs in node, which is not installed here")
    text = USER_FILE.read_text()
    (tmp_path / "user.py").write_text(text.replace("# type: ignore", "# wrong"))
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "user.py"]
    done = run(command, cwd=tmp_path, timeout_s=580)

    reported = {int(line) for line in re.findall(r"user\.py:(\d+):.*\berror\b", done.stdout)}
    lines = enumerate(text.splitlines(), start=1)
    wrong = {number for number, line in lines if line.endswith("# type: ignore")}
    assert len(wrong) == 24
    assert reported == wrong, done.stdout + done.stderr
    assert "num_gpu" in done.stdout and "'retyr'" in done.stdout


@pytest.mark.parametrize("name", CALL)
def test_the_type_of_an_option_matches_its_kind(name: str) -> None:
    hints = set(get_args(get_type_hints(CallOptions)[name])) - {type(None)}
    kind = CALL[name].kind
    if kind is None:
        return
    if kind.words:
        [words] = hints
        assert get_args(words) == kind.words
    else:
        # Type checkers accept an int as a float, and the options accept any real number.
        assert set(kind.types) <= hints | ({int, Real} if hints & {int, float} else set())


def test_the_literal_types_of_functions_match_the_options() -> None:
    options = get_type_hints(CallOptions)
    for takes_options in (gpu_client, run_in_worker):
        named = {name: hint for name, hint in get_type_hints(takes_options).items() if name in options}
        assert named == {name: options[name] for name in ("start_method", "gpu", "on_oom")}
    assert get_type_hints(simulate)["options"].__args__ == (SimulationOptions,)
