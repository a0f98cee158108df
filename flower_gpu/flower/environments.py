"""Run-time environments: what an app declares, installed once for each content, and kept.

::

    a message of a SuperNode with --allow-runtime-dependency-installation, or a ServerApp of `launch`
      │  what the app's pyproject.toml declares, this Python and uv's settings name the environment
      ├── it is there: it is used, and locked for as long as this process lives
      └── else one process of the account makes it, under a lock, and others wait
            │  uv runs in a worker that ends with this process, in a temporary folder
            └── which gets the environment's name when all is in it

Flower's own installs into a folder of the run for each message, and the message that ends first removes it.
As there, the environment comes before this process's packages, and flwr stays what it is here. What is here
in a version that will do is not installed again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import platform
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import tomli_w
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from flower_gpu import files
from flower_gpu.errors import ConfigError, FlowerGPUError
from flower_gpu.flower import distribution, package_content, package_sources
from flower_gpu.flower.private_names import find
from flower_gpu.options import ENVIRONMENTS_DIR, SERVER_IDLE
from flower_gpu.printable import path_text, without_secrets
from flower_gpu.workers import caller as worker
from flower_gpu.workers import interpreter, methods
from flower_gpu.workers.call import Call
from flower_gpu.workers.forkserver import client, identity

#: Flower's option of a SuperNode and of what it starts.
OPTION: Final = "--allow-runtime-dependency-installation"

_OURS: Final = (*distribution.NAMES, "flower-gpu")  # in no environment: what is here is what is used
_INSTALLER: Final = "install_app_dependencies"  # Flower's
_FAILURE: Final = "RuntimeDependencyInstallationError"
_KEPT_S: Final = 7 * 24 * 3600.0  # unused
_RETRY_S: Final = 60.0  # after a failure, within the same run
_IDLE_S: Final = 3600.0  # a round may take longer than a fork server stays for nobody
_LINES: Final = 20  # of uv's, in an error
_OF_RUNS: Final = ".runs"  # end of the name of a file with the environments of runs
_NAME: Final = re.compile(rf"[0-9a-f]{{20}}(\.failed|\{_OF_RUNS}|\{package_sources.SUFFIX})?")
# Of an app's [tool.uv]: what is about other parts of its pyproject.toml than the one that is installed.
_OF_OTHER_PARTS: Final = ("conflicts", "default-groups", "dependency-groups", "dev-dependencies", "workspace")

_log = logging.getLogger("flwr.flower_gpu")
# Those that this process uses, one at most, each with the descriptor by which it is locked.
_used: dict[str, files.Descriptor] = {}


def used() -> str | None:
    """Return the folder of the environment of this process's app; None where it has none."""
    return next(iter(_used), None)


def replace_installation(module: str, *, is_confined: bool = False) -> None:
    """Have Flower's code in a module use these environments where it would install what an app declares.

    ``is_confined``: then nothing of the environment is imported by this process, whose worker has to use it.
    Raises ConfigError if this version of Flower would install in another way, and the app is confined.
    """
    if find(f"{module}:{_INSTALLER}") is None:
        if is_confined and OPTION in sys.argv:
            raise ConfigError("--confine: this version of Flower installs packages in an unknown way")
        return
    runtime = sys.modules[module]

    def install(project_dir: str | Path, *_: Any, run_id: int | None = None, **__: Any) -> None:
        try:
            _prepare(Path(project_dir), run_id, is_confined=is_confined)
        except (FlowerGPUError, OSError) as error:
            raise getattr(runtime, _FAILURE, ConfigError)(str(error)) from None
        if (folder := used()) is not None and not is_confined:
            os.environ.setdefault(str(SERVER_IDLE.variable), f"{_IDLE_S:g}")  # of its own fork server
            interpreter.use_environment(folder)

    setattr(runtime, _INSTALLER, install)


def environments_folder(environ: Mapping[str, str]) -> Path:
    """Return the folder of this account's environments."""
    if given := ENVIRONMENTS_DIR.resolve(None, environ):
        return Path(given).absolute()
    return Path(environ.get("FLWR_HOME") or Path("~/.flwr").expanduser()).absolute() / "flower-gpu-envs"


def made_folder(environ: Mapping[str, str]) -> Path:
    """Return that folder, made where it is missing; raises ConfigError if it cannot be used."""
    path, what = environments_folder(environ), "belongs to others, or they can write to it"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if files.is_own_folder(path):
            return path
    except OSError as error:
        what = f"cannot be made: {error.strerror}"
    raise ConfigError(
        f"what apps declare cannot be kept in {path_text(path)}, which {what}. Set "
        f"{ENVIRONMENTS_DIR.variable} to another folder"
    )


def _prepare(app: Path, run: int | None, *, is_confined: bool) -> None:
    """Find or make the environment of an app, and use it unless all that the app declares is here."""
    declared = _declared(app, is_confined=is_confined)
    if not declared["project"]["dependencies"]:
        return
    folder = made_folder(os.environ)
    declared = package_sources.pinned(declared, folder, run, _commits)
    settings = sorted(each for each in os.environ.items() if each[0].startswith("UV_"))
    content = [declared, is_confined, sys.version, sys.prefix, identity.packages(), settings]
    paths = package_sources.local_paths(declared)
    # A run keeps the environment of its first message, also if files of a package change meanwhile.
    of_runs = package_sources.OfRuns(_place(folder, content).with_suffix(_OF_RUNS))
    known = of_runs.read().get(str(run)) if paths and run is not None else None
    lock = _locked_for_use(place := folder / str(known)) if known else None
    if lock is None:
        place = _place(folder, [*content, {str(path): package_content.digest(path) for path in paths}])
        lock = _locked_for_use(place)
    if lock is None:
        with files.locked(place.with_suffix(".lock"), wait_s=None):
            lock = _locked_for_use(place)
            if lock is None:
                lock = _made(place, declared, run, is_confined=is_confined)
    if paths and run is not None and known != place.name:
        of_runs.add(run, place.name)
    if lock is not None and any(Path(interpreter.packages_of(str(place))).glob("*.dist-info")):
        _used[str(place)] = lock


def _place(folder: Path, content: Sequence[Any]) -> Path:
    """Return the path for an environment, or for what is known of several, by what decides its content."""
    text = json.dumps(content, sort_keys=True, default=str)
    return folder / hashlib.sha256(text.encode()).hexdigest()[:20]


def _commits(references: Sequence[package_sources.Reference]) -> dict[package_sources.Reference, str]:
    """Ask git repositories, in a worker: git ends with this process."""
    call = Call(package_sources.commits, (references,), label="asking git")
    try:
        found: dict[package_sources.Reference, str] = worker.run(call, _method(), otherwise=methods.SPAWN)
        return found
    except FlowerGPUError:
        return {}


def _method() -> methods.StartMethod:
    return methods.FORKSERVER if client.is_supported() else methods.SPAWN


def _declared(app: Path, *, is_confined: bool) -> Mapping[str, Any]:
    """Return a pyproject.toml with what an app declares, and no more."""
    given = tomllib.loads((app / "pyproject.toml").read_text())
    project = given.get("project", {})
    needed = [package_sources.requirement(text) for text in project.get("dependencies", ())]
    wanted = [each for each in needed if canonicalize_name(each.name) != "flower-gpu"]
    if not any(each.extras or canonicalize_name(each.name) not in _OURS for each in wanted):
        wanted = []
    python = project.get("requires-python", "")
    if SpecifierSet(python).contains(platform.python_version(), prereleases=True):  # else uv says it
        python = f"=={sys.version_info.major}.{sys.version_info.minor}.*"
    settings: dict[str, Any] = {"environments": [f"sys_platform == '{sys.platform}'"]}
    if not is_confined:
        settings |= given.get("tool", {}).get("uv", {})
    elif direct := next((each for each in wanted if each.url), None):
        raise ConfigError(
            f"--confine: {direct.name} is no package of an index. Apps that are confined get wheels from the "
            "indexes of the SuperNode's own settings only"
        )
    for name in _OF_OTHER_PARTS:
        settings.pop(name, None)
    for source in settings.get("sources", {}).values():
        for each in source if isinstance(source, list) else [source]:
            if "path" in each:
                each["path"] = str(app.absolute() / each["path"])
    return {
        "project": {
            "name": "app",
            "version": "0",
            "requires-python": python,
            "dependencies": sorted(map(str, wanted)),
        },
        "tool": {"uv": settings},
    }


def _locked_for_use(place: Path) -> files.Descriptor | None:
    """Lock an environment against removal, as several processes may; None if it is not there."""
    with suppress(FileNotFoundError):
        lock = files.opened(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        if files.try_lock(lock, fcntl.LOCK_SH) and files.still_has_name(lock, place):
            os.utime(place)
            return lock
    return None


def _made(
    place: Path, declared: Mapping[str, Any], run: int | None, *, is_confined: bool
) -> files.Descriptor | None:
    """Make an environment, as a whole or not at all, and lock it for use.

    Raises ConfigError with uv's last lines if that cannot be; without them if this run was told them before.
    """
    failed, said = place.with_suffix(".failed"), None
    again = ConfigError("what the app declares cannot be installed, as an earlier message of this run said")
    with suppress(FileNotFoundError):
        said = failed.read_text()
        if said.startswith(f"{run}\n") and time.time() - failed.stat().st_mtime < _RETRY_S:
            raise again
    _remove_unused(place.parent)
    began = time.monotonic()
    needed = map(package_sources.requirement, declared["project"]["dependencies"])
    _log.info("installing what the app declares: %s", ", ".join(map(package_sources.shown, needed)))
    with files.temporary_folder("environment", place.parent) as temporary:
        call = Call(install, (declared, str(temporary), is_confined), label="the installation")
        try:
            worker.run(call, _method(), otherwise=methods.SPAWN)
        except (FlowerGPUError, subprocess.CalledProcessError) as error:
            output = error.output if isinstance(error, subprocess.CalledProcessError) else str(error)
            # URLs of packages and indexes can have credentials, and uv masks only those before the host.
            end = without_secrets("\n".join(output.strip().splitlines()[-_LINES:]))
            with files.replaced(failed) as new:
                new.write_text(f"{run}\n{end}")
            if said == f"{run}\n{end}":
                raise again from None
            raise ConfigError(f"what the app declares cannot be installed. uv's last lines:\n{end}") from None
        lock = _locked_for_use((temporary / "env").rename(place))
    failed.unlink(missing_ok=True)
    _log.info("installed in %.1f s, in %s", time.monotonic() - began, path_text(place))
    return lock


def install(declared: Mapping[str, Any], folder: str, only_wheels: bool) -> None:
    """Make an environment below a folder; runs in a worker, which ends with its caller, and uv with it.

    ``only_wheels``: no code of a package is run.
    Raises CalledProcessError with uv's output.
    """
    project, made = Path(folder, "project"), Path(folder, "env")
    project.mkdir()
    options = ["--python", sys.executable, *(["--no-build"] if only_wheels else [])]
    # uv keeps what it has built of a folder until its pyproject.toml changes.
    local = set(package_sources.local_paths(declared).values())
    here = _installed()
    settings = declared["tool"]["uv"]
    preferred = [*settings.get("constraint-dependencies", ()), *(f"{name}=={here[name]}" for name in here)]
    own = {**declared, "tool": {"uv": {**settings, "constraint-dependencies": preferred}}}
    try:
        _lock(project, own, [*options, *_refreshed(local)])
    except subprocess.CalledProcessError:  # the app needs other versions
        _lock(project, declared, [*options, *_refreshed(local)])
    versions: dict[str, set[str]] = {}
    for package in tomllib.loads((project / "uv.lock").read_text())["package"]:
        is_same = "registry" in package["source"]  # as one of that version here; others may be anything
        if not {"path", "directory", "editable"}.isdisjoint(package["source"]):
            local.add(package["name"])
        versions.setdefault(package["name"], set()).add(_public(package["version"]) if is_same else "")
    left_out = {name for name, found in versions.items() if name in _OURS or found == {here.get(name)}}
    _uv(project, ["venv", "--relocatable", "--no-project", "--python", sys.executable, str(made)])
    without = [part for name in sorted(left_out) for part in ("--no-install-package", name)]
    more = [*options, *without, *_refreshed(local)]
    _uv(project, ["sync", "--frozen", "--inexact", "--no-install-project", *more], made)
    if only_wheels:  # a confined worker could not keep what it compiles
        import compileall

        compileall.compile_dir(interpreter.packages_of(str(made)), quiet=2)


def _refreshed(names: Iterable[str]) -> list[str]:
    return [part for name in sorted(names) for part in ("--refresh-package", name)]


def _lock(project: Path, declared: Mapping[str, Any], options: Sequence[str]) -> None:
    (project / "pyproject.toml").write_text(tomli_w.dumps(declared))
    _uv(project, ["lock", *options])


def _uv(project: Path, arguments: Sequence[str], made: Path | None = None) -> None:
    env = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}
    if made is not None:
        env["UV_PROJECT_ENVIRONMENT"] = str(made)
    command = [sys.executable, "-m", "uv", *arguments]
    streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE}
    subprocess.run(command, cwd=project, env=env, check=True, text=True, stderr=subprocess.STDOUT, **streams)


def _installed() -> dict[str, str]:
    """Return the versions of the packages of this Python, by their names."""
    found = [(each.metadata["Name"], _public(each.version)) for each in metadata.distributions()]
    # The first of a name on the path counts.
    return {canonicalize_name(name): version for name, version in reversed(found) if name and version}


def _public(version: str) -> str:
    """Return a version without its local part, which an index does not know, such as torch's of CUDA."""
    try:
        return Version(version).public
    except InvalidVersion:
        return ""


def _remove_unused(parent: Path) -> None:
    """Remove what nobody has used for a week, and what killed processes have left."""
    files.remove_stale_folders(parent)
    for path in parent.iterdir():
        with suppress(OSError, RecursionError):
            if _NAME.fullmatch(path.name) and time.time() - path.lstat().st_mtime > _KEPT_S:
                descriptor = files.opened(path, os.O_RDONLY | os.O_NOFOLLOW)
                if files.try_lock(descriptor) and files.still_has_name(descriptor, path):
                    with files.temporary_folder("environment", parent) as temporary:
                        path.rename(temporary / path.name)  # gone as a whole, whatever happens now
