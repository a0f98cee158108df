"""Flower's ``flwr-clientapp`` and ours, to be run side by side on the same host."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from clientapp_supernode import Handed, SuperNode
from waiting import until

from flower_gpu.flower import commands
from flower_gpu.workers.forkserver.identity import script_folders

#: Who handles a message: Flower's own command; ours, which only starts faster; ours, with a lease.
FLOWERS, FAST, LEASED = "flower's", "fast", "leased"
WAYS = (FLOWERS, FAST, LEASED)
COMMAND = "flwr-clientapp"
TIMEOUT_S = 150  # far above what it takes: it only ends a test that hangs

_RULES = {FLOWERS: "", FAST: "start", LEASED: "lease"}
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class Commands:
    """Both commands, with one environment and folders of a test's own.

    ``folder`` is for what they write, ``more`` are further environment variables: those of a host.
    """

    def __init__(self, folder: Path, more: Mapping[str, str]) -> None:
        self.folder = folder
        self._ours = ""
        kept = ("FLOWER_GPU_STATE_DIR", "FLOWER_GPU_SERVER_IDLE_S")
        self.env = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("FLOWER_GPU", "FLWR_", "CUDA_")) or name in kept
        }
        self.env |= {"FLWR_HOME": str(folder / "flwr"), "FLWR_TELEMETRY_ENABLED": "0"}
        self.env |= more

    def program_of_ours(self) -> str:
        """Return our command, made in the state folder; from now on that very file is started."""
        self._ours = program(LEASED)
        return self._ours

    def start(
        self,
        way: str,
        arguments: Sequence[str],
        env: Mapping[str, str] | None = None,
        wrapper: Sequence[str] = (),
        **options: Any,
    ) -> subprocess.Popen[str]:
        """Start a command in a process group of its own; its output is captured unless told otherwise."""
        environ = {**self.env, "FLOWER_GPU_SUPERNODE": _RULES[way], **(env or {})}
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(
            [*wrapper, (way != FLOWERS and self._ours) or program(way), *arguments],
            env=environ,
            text=True,
            errors="replace",
            process_group=0,
            **{**pipes, "cwd": self.folder, **options},
        )

    def run(self, way: str, arguments: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        text = options.pop("input", None)
        if text is not None:
            options["stdin"] = subprocess.PIPE
        return finished(self.start(way, arguments, **options), text)

    def tell(
        self, way: str, node: SuperNode, config: Mapping[str, Any] | None = None, **options: Any
    ) -> tuple[dict[str, Any], subprocess.CompletedProcess[str]]:
        """Have a message handled; return what the app says of its process, and the command."""
        path = self.folder / "told.json"
        path.unlink(missing_ok=True)
        context = {name: options.pop(name, None) for name in ("run_config", "node_config")}
        handed = node.hand_out({"tell": str(path), **(config or {})}, **context)
        done = self.run(way, handed.arguments, **options)
        assert node.status(handed) == ("completed", ""), done.stderr
        assert not node.reply(handed).has_error()
        assert done.returncode == 0, done.stderr
        return json.loads(path.read_text()), done

    def at_work(
        self, way: str, node: SuperNode, *more: str, run_config: Mapping[str, Any] | None = None
    ) -> tuple[subprocess.Popen[str], Handed, int]:
        """Start a command with a message that is never done; return with the app's pid when it runs."""
        path = self.folder / f"at-work-{time.monotonic_ns()}"
        handed = node.hand_out({"wait": str(path)}, run_config)
        process = self.start(way, (*handed.arguments, *more))
        until(lambda: process.poll() is not None or (path.exists() and path.read_text()), "the app runs")
        assert process.poll() is None, finished(process).stderr
        return process, handed, int(path.read_text())


def program(way: str) -> str:
    """Return the path of a command."""
    if way != FLOWERS:
        return str(commands.CommandFolder().make() / COMMAND)
    found = shutil.which(COMMAND, path=os.pathsep.join(script_folders()))
    assert found is not None
    return found


def finished(process: subprocess.Popen[str], text: str | None = None) -> subprocess.CompletedProcess[str]:
    """Wait for the end of a command; one that does not end fails the test."""
    try:
        stdout, stderr = process.communicate(text, timeout=TIMEOUT_S)
    except BaseException:
        process.kill()
        process.communicate()
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, stdout or "", plain(stderr or ""))


def plain(text: str) -> str:
    """Return a text without colours."""
    return _COLOURS.sub("", text)


def status(code: int) -> int:
    """Return an exit status as a shell shows it: 128 and the number for a signal."""
    return 128 - code if code < 0 else code
