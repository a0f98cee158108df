"""What happened in a run, as JSON lines that many processes append to one file.

A line is written by a single ``write`` to a descriptor opened with ``O_APPEND``, so lines of different
processes do not mix; a process killed in between can leave a torn last line, which readers skip.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flower_gpu.config import run_dir

VERSION = 1
FILE_NAME = "trace.jsonl"
_START = f'{{"v": {VERSION}, "time": '  # of every line


def write(event: str, **fields: Any) -> None:
    """Append one event to the trace of the current run; do nothing outside of a run."""
    folder = run_dir()
    if folder is None:
        return
    line = {"v": VERSION, "time": time.time(), "event": event, **fields}
    data = (json.dumps(line, default=str) + "\n").encode()
    try:
        descriptor = os.open(folder / FILE_NAME, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError:  # a removed folder or a full disk must not end a training run
        return
    try:
        os.write(descriptor, data)
    except OSError:
        pass
    finally:
        os.close(descriptor)


def read(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the events of a trace file, oldest first; skip what is torn or not ours."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return
    for line in text.splitlines():
        event = _parse(line)
        if event is None:  # torn; then the next process's line begins in the middle of it
            event = _parse(line[max(line.rfind(_START), 0) :])
        if isinstance(event, dict) and event.get("v") == VERSION:
            yield event


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None
