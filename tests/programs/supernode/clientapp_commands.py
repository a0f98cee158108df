"""Runs Flower's ``flwr-clientapp`` and ours side by side on the same host."""

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

from clientapp_supernode import PendingMessage, SuperNode
from waiting import until

from flower_gpu.programs import commands
from flower_gpu.workers.forkserver.identity import script_folders

#: The commands that may handle a message: Flower's, ours with a fast start only, and ours with a lease.
FLOWERS, FAST, LEASED = "flower's", "fast", "leased"
WAYS = (FLOWERS, FAST, LEASED)
COMMAND = "flwr-clientapp"
TIMEOUT_S = 150  # far above the usual time, so it ends only tests that hang

_RULES = {FLOWERS: "", FAST: "start", LEASED: "lease"}
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class Commands:
    """Both commands, with the same environment and with folders for one test.

    ``folder``: working folder of the commands. ``more``: further environment variables, those of a host.
    """

    def __init__(self, folder: Path, more: Mapping[str, str]) -> None:
        self.folder = folder
        self._ours = ""
        kept = ("FLOWER_GPU_STATE_DIR", "FLOWER_GPU_SERVER_IDLE_S", "FLOWER_GPU_SAY_WAIT_S")
        self.env = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("FLOWER_GPU", "FLWR_", "CUDA_")) or name in kept
        }
        self.env |= {"FLWR_HOME": str(folder / "flwr"), "FLWR_TELEMETRY_ENABLED": "0"}
        self.env |= more

    def program_of_ours(self) -> str:
        """Create our command in the state folder and return its path. Later starts run this same file."""
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
        """Start a command in a new process group. Its output is captured unless ``options`` redirect it."""
        command_env = {**self.env, "FLOWER_GPU_SUPERNODE": _RULES[way], **(env or {})}
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(
            [*wrapper, (way != FLOWERS and self._ours) or program(way), *arguments],
            env=command_env,
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

    def handle(
        self, way: str, node: SuperNode, config: Mapping[str, Any] | None = None, **options: Any
    ) -> tuple[dict[str, Any], subprocess.CompletedProcess[str]]:
        """Handle a message. Returns the app's report about its process, and the result of the command."""
        path = self.folder / "report.json"
        path.unlink(missing_ok=True)
        context = {name: options.pop(name, None) for name in ("run_config", "node_config")}
        pending = node.hand_out({"tell": str(path), **(config or {})}, **context)
        completed = self.run(way, pending.arguments, **options)
        assert node.status(pending) == ("completed", ""), completed.stderr
        assert not node.reply(pending).has_error()
        assert completed.returncode == 0, completed.stderr
        return json.loads(path.read_text()), completed

    def at_work(
        self, way: str, node: SuperNode, *more: str, run_config: Mapping[str, Any] | None = None
    ) -> tuple[subprocess.Popen[str], PendingMessage, int]:
        """Start a command with a message that never ends. Returns after the app has started, with its pid."""
        path = self.folder / f"at-work-{time.monotonic_ns()}"
        pending = node.hand_out({"wait": str(path)}, run_config)
        process = self.start(way, (*pending.arguments, *more))
        until(lambda: process.poll() is not None or (path.exists() and path.read_text()), "the app runs")
        assert process.poll() is None, finished(process).stderr
        return process, pending, int(path.read_text())


def program(way: str) -> str:
    """Return the path of a command."""
    if way != FLOWERS:
        return str(commands.CommandFolder().make() / COMMAND)
    path = shutil.which(COMMAND, path=os.pathsep.join(script_folders()))
    assert path is not None
    return path


def finished(process: subprocess.Popen[str], text: str | None = None) -> subprocess.CompletedProcess[str]:
    """Wait for the end of a command. The test fails if the command does not end."""
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
    """Return an exit status as a shell shows it: 128 plus the number of a signal."""
    return 128 - code if code < 0 else code
