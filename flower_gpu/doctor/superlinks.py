"""Other processes of this host; SuperLinks that install what apps declare, or outlive their variables."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from flower_gpu.doctor import Found

# flwr.superlink.cli.flower_superlink and flwr.cli.local_superlink, as of flwr 1.41.
_DISABLED = "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"
_DISABLE = "--disable-runtime-dependency-installation"
_ALLOW = "--allow-runtime-dependency-installation"
_LOCAL_LOG = "local-superlink/superlink.log"

# What workers inherit from the process that starts a run.
_PREFIX = "FLOWER_GPU_"
_OTHERS = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "LD_LIBRARY_PATH")
_NOT_COMPARED = ("FLOWER_GPU_RUN_DIR", "FLOWER_GPU_CLIENT", "FLOWER_GPU_LEASE")


@dataclass(frozen=True)
class OtherProcess:
    """A process; its variables are None where this account may not see them."""

    pid: int
    command: tuple[str, ...]
    environ: Mapping[str, str] | None

    def runs(self, program: str) -> bool:
        """Tell whether this is a Python command with that name, whatever its folder."""
        # The interpreter may have options of its own before the script's path.
        return any(argument.rpartition("/")[2] == program for argument in self.command[:4])

    def option(self, name: str) -> str | None:
        """Return the value of an option of the command line; ``""`` if it has none, None if it is missing."""
        parser = ArgumentParser(add_help=False, allow_abbrev=False)
        parser.add_argument(name, dest="value", nargs="?", const="")
        value: str | None = parser.parse_known_args(self.command)[0].value
        return value


def others() -> Iterator[OtherProcess]:
    """Yield all processes but this one and those it comes from: their variables are ours."""
    import psutil

    own = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it has ended
            if process.pid not in own and (command := process.cmdline()):
                environ = None
                with suppress(psutil.AccessDenied):  # another account's
                    environ = process.environ()
                yield OtherProcess(process.pid, tuple(command), environ)


def superlinks() -> Iterator[Found]:
    """Check whether SuperLinks and SuperNodes install what apps declare, and see today's variables."""
    found = [each for each in others() if each.runs("flower-superlink") or each.runs("flower-supernode")]
    if not found:
        yield "ok", "no SuperLink and no SuperNode is running"
    for process in found:
        kind = "SuperLink" if process.runs("flower-superlink") else "SuperNode"
        if how := _how_to_save(process):
            text = f"{kind} {process.pid} installs what an app declares before each run"
            if process.environ is None:
                text += f", unless {_DISABLED}=1 is set there, which this account cannot see"
            yield "note", text, f"to save that time, {how}"
        else:
            yield "ok", f"{kind} {process.pid} runs apps in an environment that is there already"
        if kind == "SuperLink" and (process.option("--log-file") or "").endswith(_LOCAL_LOG):
            yield from _outlived(process)


def _how_to_save(process: OtherProcess) -> str:
    """Say how a process would not install what apps declare; empty where it does not."""
    if process.runs("flower-supernode"):
        return "" if process.option(_ALLOW) is None else f"start it again without {_ALLOW}"
    is_disabled = (
        process.option("--isolation") == "process"  # others have started the processes of apps
        or process.option(_DISABLE) is not None
        or (process.environ or {}).get(_DISABLED) == "1"
    )
    return "" if is_disabled else f"start it with {_DISABLE} or {_DISABLED}=1"


def _outlived(process: OtherProcess) -> Iterator[Found]:
    """Check whether the local SuperLink that an earlier ``flwr run`` has left sees today's variables."""
    if process.environ is None:
        return
    name = f"the local SuperLink {process.pid}, which flwr run has left running,"
    todo = f"kill {process.pid}; the next `flwr run` starts a new one"
    there, here = process.environ, os.environ
    different = [
        f"{variable} ({_shown(there.get(variable))} there, {_shown(here.get(variable))} here)"
        for variable in sorted({*there, *here})
        if (variable.startswith(_PREFIX) or variable in _OTHERS) and variable not in _NOT_COMPARED
        if there.get(variable) != here.get(variable)
    ]
    if different:
        yield "problem", f"{name} has other variables than this shell: {', '.join(different)}", todo
    # Not resolved: the pythons of virtual environments are links to the same file.
    elif Path(process.command[0]).parent != Path(sys.executable).parent:
        yield "problem", f"{name} belongs to another Python, {process.command[0]}", todo
    else:
        yield "ok", f"{name} has the variables of this shell"


def _shown(value: str | None) -> str:
    return "not set" if value is None else repr(value)
