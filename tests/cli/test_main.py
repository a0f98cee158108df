"""Mistyped commands get a suggestion, and `workers` without an action lists the fork servers."""

from __future__ import annotations

import pytest

from flower_gpu.cli.main import EXIT_USAGE, main


@pytest.mark.parametrize(
    ("words", "suggestion"),
    [
        ("simulat my-app", "did you mean simulate?"),
        ("workrs", "did you mean workers?"),
        ("workers stopp", "did you mean stop?"),
    ],
)
def test_an_unknown_command_gets_the_nearest_command_as_a_suggestion(
    words: str, suggestion: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert ended.value.code == EXIT_USAGE
    assert suggestion in capsys.readouterr().err


def test_a_word_that_resembles_no_command_gets_no_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["zzzz"])
    error = capsys.readouterr().err
    assert "invalid choice: 'zzzz'" in error and "did you mean" not in error


def test_workers_without_an_action_lists_them(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FLOWER_GPU_STATE_DIR", str(tmp_path))
    assert main(["workers"]) == 0
    assert capsys.readouterr().err == "no fork server is running\n"
