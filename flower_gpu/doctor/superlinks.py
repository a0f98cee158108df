"""Other processes of this host; SuperLinks that install what apps declare, or outlive their variables."""

from __future__ import annotations

import os
import sys
import tomllib
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
_LOCAL = (":local:", ":local-in-memory:")
_LOCAL_LOG = "local-superlink/superlink.log"
# flwr.supercore.superexec.dependency_installer: the new environment goes before the process's own packages.
_INSTALLS = "installs what an app declares before each run, and finds flower-gpu among its own packages"

# What workers inherit from the process that starts a run.
_PREFIX = "FLOWER_GPU_"
_OTHERS = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "LD_LIBRARY_PATH")
_NOT_COMPARED = ("FLOWER_GPU_RUN_DIR", "FLOWER_GPU_CLIENT", "FLOWER_GPU_LEASE")


@dataclass(frozen=True)
class OtherProcess:
    """A process; its variables are None where this account may not see them."""

    pid: int
    user: int
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
                yield OtherProcess(process.pid, process.uids().real, tuple(command), environ)


def environments() -> Iterator[Found]:
    """Check whether Flower installs the dependencies of apps before each run, which takes time."""
    found = False
    for process in others():
        if process.runs("flower-superlink"):
            found = True
            yield _superlink(process)
        elif process.runs("flower-supernode") and process.option(_ALLOW) is not None:
            text = f"SuperNode {process.pid} {_INSTALLS}"
            yield "note", text, f"to save that time, start it again without {_ALLOW}"
    if not found:
        yield _next_local()


def _superlink(process: OtherProcess) -> Found:
    name = f"SuperLink {process.pid}"
    if process.option("--isolation") == "process":
        return "ok", f"{name} runs apps in processes that others have started"
    if process.option(_DISABLE) is not None:
        return "ok", f"{name} runs apps in its own environment ({_DISABLE})"
    if process.environ is None:
        return "note", f"{name} is another account's; unless {_DISABLED}=1 is set there, it {_INSTALLS}"
    if process.environ.get(_DISABLED) == "1":
        return "ok", f"{name} runs apps in its own environment ({_DISABLED}=1)"
    return "note", f"{name} {_INSTALLS}", f"to save that time, start it with {_DISABLE} or {_DISABLED}=1"


def _next_local() -> Found:
    """Tell of the SuperLink that the next ``flwr run`` would start."""
    if os.environ.get(_DISABLED) == "1":
        return "ok", f"no SuperLink is running; {_DISABLED}=1 is set for the next one"
    path = Path(os.environ.get("FLWR_HOME") or Path.home() / ".flwr") / "config.toml"
    try:
        name, address = default_connection(path)
    except (OSError, ValueError) as error:
        return "note", f"{path} cannot be read: {error}", "correct it: flwr run cannot read it either"
    if address not in _LOCAL:
        return "ok", f"no SuperLink is running; flwr run uses the connection {name} ({address})"
    text = f"flwr run would start a SuperLink here (connection {name}), which {_INSTALLS}"
    return (
        "note",
        text,
        f"to save that time, export {_DISABLED}=1 before `flwr run`; `flower-gpu launch` does that",
    )


def default_connection(path: Path) -> tuple[str, str]:
    """Return name and address of the connection that ``flwr run`` uses by default.

    ``path`` is Flower's configuration; where there is none, Flower writes one with a local SuperLink. Raises
    ValueError if it cannot be read.
    """
    if not path.exists():
        return "local", _LOCAL[0]
    try:
        connections = tomllib.loads(path.read_text(encoding="utf-8")).get("superlink", {})
        name = connections.get("default", "")
        connection = dict(connections.get(name, {}))
    except (AttributeError, TypeError) as error:
        raise ValueError(f"it has another form than Flower's: {error}") from None
    # Options without an address are an old way to write a local one.
    default = _LOCAL[0] if "options" in connection else ""
    return str(name), str(connection.get("address", default))


def outlived() -> Iterator[Found]:
    """Check whether the local SuperLink that an earlier ``flwr run`` has left sees today's variables."""
    for process in others():
        if process.environ is None or not process.runs("flower-superlink"):
            continue
        if not (process.option("--log-file") or "").endswith(_LOCAL_LOG):
            continue
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
