"""A digest of the files that an installer would build a package from.

An app that runs may write into the folder that its package was installed from: logs, caches, bytecode. If
such files counted, each message would find the package changed, and would install a new environment. These
files do not count:

- files that ``.gitignore`` files leave out: those in the folder, and those above it up to the root of the
  repository. Hatchling builds nothing from such files either;
- folders of builds at the top, unless they are packages;
- bytecode, logs, version control, virtual environments and the caches of tools. A cache with a
  ``CACHEDIR.TAG`` (https://bford.info/cachedir/) is known by that.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pathspec import GitIgnoreSpec

_LARGE_BYTES: Final = 16 << 20  # size from which size and date of a file are used instead of its content
_LEFT_BY_BUILDS: Final = re.compile(r"build|dist|.*\.egg-info")
_NOT_CONTENT: Final = re.compile(
    r"\.git|\.hg|\.svn|\.venv|\.tox|\.nox|\.eggs|\.idea|\.vscode|\.cache|\.ipynb_checkpoints"
    r"|\..*_cache|__pycache__|.*\.py[co]|.*\.log(\.\d+)?|.*\.sw[op]|.*~|\.DS_Store|\.coverage(\..*)?"
)
_CACHE_TAG: Final = "CACHEDIR.TAG"
_RULES: Final = ".gitignore"
_PROJECT: Final = "pyproject.toml"


def digest(path: Path) -> str:
    """Return a digest of the content of a file, or of the files of a folder with their names."""
    sha = hashlib.sha256()
    for file in [path] if path.is_file() else _files(path):
        sha.update(f"{file.relative_to(path)}\0".encode(errors="surrogateescape"))
        with suppress(OSError):
            state = file.stat()
            if not stat.S_ISREG(state.st_mode):  # reading a pipe would wait for its writer
                sha.update(f"{state.st_mode}".encode())
            elif state.st_size > _LARGE_BYTES:
                sha.update(f"{state.st_size} {state.st_mtime_ns}".encode())
            else:
                sha.update(hashlib.sha256(file.read_bytes()).digest())
    return sha.hexdigest()


@dataclass(frozen=True)
class _Rules:
    """The rules of one ``.gitignore``, for the files below its folder."""

    folder: Path
    spec: GitIgnoreSpec

    @classmethod
    def read(cls, folder: Path) -> _Rules | None:
        """Return the rules of a folder, or None if it has none that can be read."""
        with suppress(OSError, ValueError):
            return cls(folder, GitIgnoreSpec.from_lines((folder / _RULES).read_text().splitlines()))
        return None

    def decide(self, path: Path, *, is_folder: bool) -> bool | None:
        """Return True if a path is ignored, False if a rule takes it back in, None if no rule fits."""
        name = path.relative_to(self.folder).as_posix()
        return self.spec.check_file(f"{name}/" if is_folder else name).include


class _Ignored:
    """Decides which files of a package's folder are ignored by git."""

    def __init__(self, package: Path) -> None:
        self._rules = {rules.folder: rules for rules in _rules_above(package)}
        self._package = package

    def enter(self, folder: Path) -> None:
        """Add the rules of a folder of the package."""
        rules = _Rules.read(folder)
        # Rules that leave the package itself out are for something else, such as a folder of checkouts.
        if rules and not (folder == self._package and rules.decide(folder / _PROJECT, is_folder=False)):
            self._rules[folder] = rules

    def __contains__(self, path: Path) -> bool:
        is_folder = path.is_dir()
        for folder in path.parents:
            rules = self._rules.get(folder)
            if rules and (decision := rules.decide(path, is_folder=is_folder)) is not None:
                return decision
        return False


def _rules_above(package: Path) -> Iterator[_Rules]:
    """Yield the rules of the folders above a package, up to the root of its repository."""
    above: list[Path] = []
    for folder in (package, *package.parents):
        if folder != package:
            above.append(folder)
        if (folder / ".git").exists():
            break
    else:  # no repository
        return
    for folder in above:
        rules = _Rules.read(folder)
        parts = package.relative_to(folder).parents
        of_package = [package, *(folder / part for part in parts if part != Path())]
        if rules and not any(rules.decide(path, is_folder=True) for path in of_package):
            yield rules


def _files(package: Path) -> Iterator[Path]:
    """Yield the files that count, those behind links to folders too."""
    ignored = _Ignored(package)
    seen: set[Path] = set()
    for parent, folders, names in os.walk(package, followlinks=True):
        folder = Path(parent)
        real = folder.resolve()
        # A link that leads back, or a cache
        if real in seen or (folder != package and _CACHE_TAG in names):
            folders.clear()
            continue
        seen.add(real)
        ignored.enter(folder)

        def counts(name: str, folder: Path = folder) -> bool:
            path = folder / name
            is_left = folder == package and _is_left_by_build(path)
            return not (_NOT_CONTENT.fullmatch(name) or is_left or path in ignored)

        folders[:] = sorted(filter(counts, folders))
        yield from (folder / name for name in sorted(filter(counts, names)))


def _is_left_by_build(folder: Path) -> bool:
    """Return True if a build has left this folder, unless it is a package with one of these names."""
    is_named_so = bool(_LEFT_BY_BUILDS.fullmatch(folder.name)) and folder.is_dir()
    return is_named_so and not (folder / "__init__.py").exists()
