"""Run-time environments: the packages that an app declares, installed once per set of packages, and kept.

::

    a message of a SuperNode with --allow-runtime-dependency-installation, or a ServerApp of `launch`
      │  the name of the environment is a hash of the declared packages, this Python and uv's settings
      ├── it exists: the process uses it, and holds a shared lock until it ends
      └── otherwise a process of the account creates it, under a lock, and others wait
            │  uv runs in a temporary folder, in a worker that ends with this process
            └── a complete folder is renamed to the environment's name

Flower itself installs into a folder of the run for each message, and the message that ends first removes that
folder. As with Flower, packages of the environment take precedence over this process's packages. But flwr is
always this process's version. A package that this process has in a suitable version is not installed again.

Several processes use the folder of environments at the same time, and any may be killed. Three rules keep an
environment whole:

- It appears by a rename, so it is complete or does not exist. The lock file ``.lock`` beside it makes sure
  that only one process creates it (:func:`_made`).
- Each process that uses it holds a shared lock on its directory (:func:`_locked_for_use`). A process removes
  it only under the exclusive lock, and after a week without use (:func:`_remove_unused`).
- Between the opening of a path and its lock, another process may rename or remove it. So the path is compared
  with the open descriptor after the lock is acquired.

The kernel releases both locks when a process is killed.
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
from flower_gpu.flower import distribution
from flower_gpu.flower.private_names import find
from flower_gpu.options import ENVIRONMENTS_DIR, SERVER_IDLE
from flower_gpu.printable import path_text, without_secrets
from flower_gpu.programs import package_content, package_sources
from flower_gpu.workers import caller as worker
from flower_gpu.workers import interpreter, methods
from flower_gpu.workers.call import Call
from flower_gpu.workers.forkserver import client, identity

#: Flower's option of a SuperNode and of the programs that it starts.
OPTION: Final = "--allow-runtime-dependency-installation"

# Packages that are never installed into an environment, because this process's versions are used.
_OURS: Final = (*distribution.NAMES, "flower-gpu")
_INSTALLER: Final = "install_app_dependencies"  # Flower's function that is replaced
_FAILURE: Final = "RuntimeDependencyInstallationError"  # Flower's exception
_KEPT_S: Final = 7 * 24 * 3600.0  # time without use after which an environment is removed
_RETRY_S: Final = 60.0  # time after a failure in which the same run does not try again
# Idle time of the app's fork server. A round may take longer than the default.
_IDLE_S: Final = 3600.0
_ERROR_LINES: Final = 20  # last lines of uv's output that an error quotes
_RUNS_SUFFIX: Final = ".runs"  # suffix of files that map runs to environments
_NAME: Final = re.compile(rf"[0-9a-f]{{20}}(\.failed|\{_RUNS_SUFFIX}|\{package_sources.SUFFIX})?")
# Settings of an app's [tool.uv] about parts of its pyproject.toml that are not installed.
_IGNORED_SETTINGS: Final = (
    "conflicts",
    "default-groups",
    "dependency-groups",
    "dev-dependencies",
    "workspace",
)

_log = logging.getLogger("flwr.flower_gpu")
# The environment that this process uses, if any, with the descriptor that holds its lock.
_used: dict[str, files.Descriptor] = {}


def used() -> str | None:
    """Return the folder of the environment of this process's app, or None."""
    return next(iter(_used), None)


def replace_installation(module: str, *, is_confined: bool = False) -> None:
    """Replace Flower's installation of an app's packages in a module by these environments.

    ``is_confined``: True if only a confined worker uses the environment. This process then imports nothing
    from it.
    Raises ConfigError if the app is confined and this version of Flower installs packages in another way.
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
            # The environment has a fork server of its own, which must outlive a round.
            os.environ.setdefault(str(SERVER_IDLE.variable), f"{_IDLE_S:g}")
            interpreter.use_environment(folder)

    setattr(runtime, _INSTALLER, install)


def environments_folder(environ: Mapping[str, str]) -> Path:
    """Return the folder of this account's environments."""
    if configured := ENVIRONMENTS_DIR.resolve(None, environ):
        return Path(configured).absolute()
    return Path(environ.get("FLWR_HOME") or Path("~/.flwr").expanduser()).absolute() / "flower-gpu-envs"


def made_folder(environ: Mapping[str, str]) -> Path:
    """Return the folder of environments, created if necessary; raises ConfigError if it cannot be used."""
    path, problem = environments_folder(environ), "belongs to another user, or another user can write to it"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if files.is_own_folder(path):
            return path
    except OSError as error:
        problem = f"cannot be made: {error.strerror}"
    raise ConfigError(
        f"packages that apps declare cannot be stored in {path_text(path)}, which {problem}. Set "
        f"{ENVIRONMENTS_DIR.variable} to another folder"
    )


def _prepare(app: Path, run: int | None, *, is_confined: bool) -> None:
    """Find or create the environment of an app, and use it unless this process has all the app's packages."""
    declared = _declared(app, is_confined=is_confined)
    if not declared["project"]["dependencies"]:
        return
    folder = made_folder(os.environ)
    declared = package_sources.pinned(declared, folder, run, _commits)
    settings = sorted(item for item in os.environ.items() if item[0].startswith("UV_"))
    content = [declared, is_confined, sys.version, sys.prefix, identity.packages(), settings]
    paths = package_sources.local_paths(declared)
    # A run keeps the environment of its first message, even if files of a package change during the run.
    run_environments = package_sources.OfRuns(_place(folder, content).with_suffix(_RUNS_SUFFIX))
    known = run_environments.read().get(str(run)) if paths and run is not None else None
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
        run_environments.add(run, place.name)
    if lock is not None and any(Path(interpreter.packages_of(str(place))).glob("*.dist-info")):
        _used[str(place)] = lock


def _place(folder: Path, content: Sequence[Any]) -> Path:
    """Return a path in the folder whose name is a hash of the content."""
    text = json.dumps(content, sort_keys=True, default=str)
    return folder / hashlib.sha256(text.encode()).hexdigest()[:20]


def _commits(references: Sequence[package_sources.Reference]) -> dict[package_sources.Reference, str]:
    """Return the commits of git references. A worker asks the repositories, so git ends with this process."""
    call = Call(package_sources.commits, (references,), label="asking git")
    try:
        commits: dict[package_sources.Reference, str] = worker.run(call, _method(), otherwise=methods.SPAWN)
        return commits
    except FlowerGPUError:
        return {}


def _method() -> methods.StartMethod:
    return methods.FORKSERVER if client.is_supported() else methods.SPAWN


def _declared(app: Path, *, is_confined: bool) -> Mapping[str, Any]:
    """Return the content of a pyproject.toml with the app's dependencies and uv's settings only."""
    document = tomllib.loads((app / "pyproject.toml").read_text())
    project = document.get("project", {})
    dependencies = [package_sources.requirement(text) for text in project.get("dependencies", ())]
    wanted = [package for package in dependencies if canonicalize_name(package.name) != "flower-gpu"]
    if not any(package.extras or canonicalize_name(package.name) not in _OURS for package in wanted):
        wanted = []
    python = project.get("requires-python", "")
    # If this Python does not match, uv reports that.
    if SpecifierSet(python).contains(platform.python_version(), prereleases=True):
        python = f"=={sys.version_info.major}.{sys.version_info.minor}.*"
    settings: dict[str, Any] = {"environments": [f"sys_platform == '{sys.platform}'"]}
    if not is_confined:
        settings |= document.get("tool", {}).get("uv", {})
    elif direct := next((package for package in wanted if package.url), None):
        raise ConfigError(
            f"--confine: {direct.name} is not a package of an index. Apps that are confined get wheels from "
            "the indexes of the SuperNode's own settings only"
        )
    for name in _IGNORED_SETTINGS:
        settings.pop(name, None)
    for value in settings.get("sources", {}).values():
        for source in value if isinstance(value, list) else [value]:
            if "path" in source:
                source["path"] = str(app.absolute() / source["path"])
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
    """Lock an environment against removal and return the lock; None if it does not exist.

    The lock is shared, so several processes can use the environment.
    """
    with suppress(FileNotFoundError):
        lock = files.opened(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        if files.try_lock(lock, fcntl.LOCK_SH) and files.still_has_name(lock, place):
            os.utime(place)
            return lock
    return None


def _made(
    place: Path, declared: Mapping[str, Any], run: int | None, *, is_confined: bool
) -> files.Descriptor | None:
    """Create a complete environment, and return a lock for its use.

    Raises ConfigError with uv's last lines if the installation fails. The lines are left out if an earlier
    error in this run had them.
    """
    failed, previous = place.with_suffix(".failed"), None
    again = ConfigError(
        "the packages that the app declares cannot be installed, as an earlier message of this run said"
    )
    with suppress(FileNotFoundError):
        previous = failed.read_text()
        if previous.startswith(f"{run}\n") and time.time() - failed.stat().st_mtime < _RETRY_S:
            raise again
    _remove_unused(place.parent)
    began = time.monotonic()
    needed = map(package_sources.requirement, declared["project"]["dependencies"])
    _log.info(
        "installing the packages that the app declares: %s", ", ".join(map(package_sources.shown, needed))
    )
    with files.temporary_folder("environment", place.parent) as temporary:
        call = Call(install, (declared, str(temporary), is_confined), label="the installation")
        try:
            worker.run(call, _method(), otherwise=methods.SPAWN)
        except (FlowerGPUError, subprocess.CalledProcessError) as error:
            output = error.output if isinstance(error, subprocess.CalledProcessError) else str(error)
            # URLs of packages and indexes can have credentials, and uv masks only those before the host.
            end = without_secrets("\n".join(output.strip().splitlines()[-_ERROR_LINES:]))
            with files.replaced(failed) as new:
                new.write_text(f"{run}\n{end}")
            if previous == f"{run}\n{end}":
                raise again from None
            raise ConfigError(
                f"the packages that the app declares cannot be installed. uv's last lines:\n{end}"
            ) from None
        lock = _locked_for_use((temporary / "env").rename(place))
    failed.unlink(missing_ok=True)
    _log.info("installed in %.1f s, in %s", time.monotonic() - began, path_text(place))
    return lock


def install(declared: Mapping[str, Any], folder: str, only_wheels: bool) -> None:
    """Create an environment below a folder. Runs in a worker, so that uv ends with the caller.

    ``only_wheels``: install wheels only, so that no code of a package runs.
    Raises CalledProcessError with uv's output.
    """
    project, made = Path(folder, "project"), Path(folder, "env")
    project.mkdir()
    options = ["--python", sys.executable, *(["--no-build"] if only_wheels else [])]
    # Packages from folders must be refreshed, because uv reuses its build until their pyproject.toml changes.
    local = set(package_sources.local_paths(declared).values())
    installed = _installed()
    settings = declared["tool"]["uv"]
    preferred = [
        *settings.get("constraint-dependencies", ()),
        *(f"{name}=={installed[name]}" for name in installed),
    ]
    extended = {**declared, "tool": {"uv": {**settings, "constraint-dependencies": preferred}}}
    try:
        _lock(project, extended, [*options, *_refreshed(local)])
    except subprocess.CalledProcessError:  # the app needs other versions
        _lock(project, declared, [*options, *_refreshed(local)])
    versions: dict[str, set[str]] = {}
    for package in tomllib.loads((project / "uv.lock").read_text())["package"]:
        # Only a package from an index is the same as the installed package of that version.
        is_same = "registry" in package["source"]
        if not {"path", "directory", "editable"}.isdisjoint(package["source"]):
            local.add(package["name"])
        versions.setdefault(package["name"], set()).add(_public(package["version"]) if is_same else "")
    left_out = {name for name, wanted in versions.items() if name in _OURS or wanted == {installed.get(name)}}
    _uv(project, ["venv", "--relocatable", "--no-project", "--python", sys.executable, str(made)])
    without = [part for name in sorted(left_out) for part in ("--no-install-package", name)]
    more = [*options, *without, *_refreshed(local)]
    _uv(project, ["sync", "--frozen", "--inexact", "--no-install-project", *more], made)
    if only_wheels:  # a confined worker cannot write the bytecode later
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
    """Return the versions of the packages of this Python, by name."""
    packages = [(package.metadata["Name"], _public(package.version)) for package in metadata.distributions()]
    # If a name occurs several times, the first package on the path counts.
    return {canonicalize_name(name): version for name, version in reversed(packages) if name and version}


def _public(version: str) -> str:
    """Return a version without its local part, which an index does not know, such as ``+cu128`` of torch."""
    try:
        return Version(version).public
    except InvalidVersion:
        return ""


def _remove_unused(parent: Path) -> None:
    """Remove environments that were not used for a week, and temporary folders of killed processes."""
    files.remove_stale_folders(parent)
    for path in parent.iterdir():
        with suppress(OSError, RecursionError):
            if _NAME.fullmatch(path.name) and time.time() - path.lstat().st_mtime > _KEPT_S:
                descriptor = files.opened(path, os.O_RDONLY | os.O_NOFOLLOW)
                if files.try_lock(descriptor) and files.still_has_name(descriptor, path):
                    with files.temporary_folder("environment", parent) as temporary:
                        # The environment is renamed first, so that no process finds a half-removed
                        # environment.
                        path.rename(temporary / path.name)
