"""A digest of the files that an installer would build a package from.

A running app may write logs, caches and bytecode into the folder that its package was installed from. If such
files counted, each message would find the package changed, and would install a new environment. So the digest
does not include these files:

- Files that a ``.gitignore`` excludes, in the folder or above it up to the root of the repository. Hatchling
  builds nothing from such files either.
- Folders that builds create at the top level, unless they are packages.
- Bytecode, logs, version control, virtual environments and the caches of tools. A cache is recognized by its
  name, or by the file ``CACHEDIR.TAG`` in it (https://bford.info/cachedir/).
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

# The digest of a larger file uses its size and date instead of its content.
_LARGE_BYTES: Final = 16 << 20
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
            # Only regular files are read, because reading a pipe would wait for its writer.
            if not stat.S_ISREG(state.st_mode):
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
        """Return the rules of a folder, or None if it has no readable ``.gitignore``."""
        with suppress(OSError, ValueError):
            return cls(folder, GitIgnoreSpec.from_lines((folder / _RULES).read_text().splitlines()))
        return None

    def decide(self, path: Path, *, is_folder: bool) -> bool | None:
        """Return True if a path is ignored, False if a rule includes it again, None if no rule matches."""
        name = path.relative_to(self.folder).as_posix()
        return self.spec.check_file(f"{name}/" if is_folder else name).include


class _Ignored:
    """The paths in a package's folder that git ignores. Use it with ``in``."""

    def __init__(self, package: Path) -> None:
        self._rules = {rules.folder: rules for rules in _rules_above(package)}
        self._package = package

    def enter(self, folder: Path) -> None:
        """Add the rules of a folder of the package."""
        rules = _Rules.read(folder)
        # Skip rules that exclude the package itself. They have another purpose, for example to exclude a
        # folder of checkouts.
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
    """Yield the files that count, including files behind links to folders."""
    ignored = _Ignored(package)
    seen: set[Path] = set()
    for parent, folders, names in os.walk(package, followlinks=True):
        folder = Path(parent)
        real = folder.resolve()
        # Skip a link to a folder that was already visited, and a cache.
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
    """Return True if this folder has the name of a build's output, and is not a package of that name."""
    is_named_so = bool(_LEFT_BY_BUILDS.fullmatch(folder.name)) and folder.is_dir()
    return is_named_so and not (folder / "__init__.py").exists()
