"""The content of declared packages that come from a folder or from git.

The key of an environment depends on the packages that the app declares. But the content of a folder or a
branch can change while its name stays the same. So the key also depends on the content:

- For a file or folder of this host, a digest of the content (:mod:`.package_content`) is part of the key. The
  same holds for folders that the package itself names as sources.
- A branch, a tag or a repository's default branch is replaced by its current commit. ``git ls-remote`` is
  asked once for each run, so all messages of a run get the same packages, even after a push. If the
  repository cannot be reached, the last known commit is used.
- A short hexadecimal number may be a commit or the name of a branch. It counts as a commit if the repository
  has no branch or tag of that name. The repository is not asked again, because a commit never changes.

The content of an archive at a URL is assumed to be constant.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import subprocess
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from packaging.requirements import InvalidRequirement, Requirement

from flower_gpu import files
from flower_gpu.errors import ConfigError

#: Suffix of the files with the commits of runs.
SUFFIX: Final = ".commits"

_GIT: Final = "git+"
_COMMIT: Final = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}", re.IGNORECASE)  # SHA-1 or SHA-256
_SHORT_COMMIT: Final = re.compile(r"[0-9a-f]{7,63}", re.IGNORECASE)
_RUNS: Final = 16  # number of runs that are remembered
_ASK_S: Final = 60.0  # seconds without an answer after which a repository counts as unreachable

#: A repository, and a reference there: ``HEAD``, ``refs/...``, or the short name of a branch or tag.
Reference = tuple[str, str]
_log = logging.getLogger("flwr.flower_gpu")


def requirement(text: str) -> Requirement:
    """Return a parsed requirement.

    Raises ConfigError if it is invalid. The message has the name only, because a URL may hold credentials.
    """
    try:
        return Requirement(text)
    except InvalidRequirement:
        name = re.match(r"[\w.-]*", text)
        raise ConfigError(
            f"pyproject.toml: the dependency {name[0] if name else ''!r} is not a requirement as defined by "
            "PEP 508"
        ) from None


def shown(needed: Requirement) -> str:
    """Return the name and versions of a requirement, without its URL, which may hold credentials."""
    extras = f"[{','.join(sorted(needed.extras))}]" if needed.extras else ""
    return f"{needed.name}{extras}{needed.specifier}"


def local_paths(declared: Mapping[str, Any]) -> dict[Path, str]:
    """Return the names of the packages that come from files and folders of this host, by path.

    ``declared``: content of a pyproject.toml, with absolute paths.
    """
    result: dict[Path, str] = {}
    for text in declared["project"]["dependencies"]:
        needed = requirement(text)
        url = urlsplit(needed.url or "")
        if url.scheme == "file":
            _add_path(result, Path(unquote(url.path)), needed.name)
    for name, path in _paths(declared):
        _add_path(result, path, name)
    return result


def _paths(declared: Mapping[str, Any]) -> Iterator[tuple[str, Path]]:
    for name, source in declared.get("tool", {}).get("uv", {}).get("sources", {}).items():
        for item in source if isinstance(source, list) else [source]:
            if "path" in item:
                yield name, Path(item["path"])


def _add_path(result: dict[Path, str], path: Path, name: str) -> None:
    """Add a path, and the paths in the pyproject.toml of a folder."""
    path = path.resolve()
    if path in result:
        return
    result[path] = name
    # If the file is missing or cannot be read, uv reports that.
    with suppress(OSError, ValueError):
        for their_name, their_path in _paths(tomllib.loads((path / "pyproject.toml").read_text())):
            _add_path(result, path / their_path, their_name)


class OfRuns:
    """A file of this account with a value for each of the last runs."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> dict[str, Any]:
        """Return the values by run, the newest run last."""
        with suppress(OSError, ValueError):
            result = json.loads(self._path.read_text())
            return result if isinstance(result, dict) else {}
        return {}

    def add(self, run: int | None, value: Any) -> None:
        """Remember a value for a run.

        Without a lock, a value that another process adds at the same time may be lost.
        """
        others = {name: known for name, known in self.read().items() if name != str(run)}
        with files.replaced(self._path, mode=0o600) as new:
            new.write_text(json.dumps(dict([*others.items(), (str(run), value)][-_RUNS:])))


def pinned(
    declared: Mapping[str, Any],
    folder: Path,
    run: int | None,
    ask: Callable[[Sequence[Reference]], Mapping[Reference, str]],
) -> Mapping[str, Any]:
    """Return a pyproject.toml with the commits that its branches and tags have in a run.

    ``folder``: folder in which the commits of runs are kept.
    ``ask``: function such as :func:`commits`.
    """
    references = _references(declared)
    if not references:
        return declared
    # URLs may hold credentials, so the file has digests of the references.
    keys = {item: hashlib.sha256("\0".join(item).encode()).hexdigest() for item in references}
    place = folder / hashlib.sha256("".join(sorted(keys.values())).encode()).hexdigest()[:20]
    of_runs = OfRuns(place.with_suffix(SUFFIX))
    with files.locked(place.with_suffix(".lock"), wait_s=None):
        known: dict[str, dict[str, str]] = of_runs.read()
        of_run = known.get(str(run)) if run is not None else None
        if of_run is None:
            last = next(reversed(known.values()), {})
            # A reference that is equal to its known commit is a commit itself.
            asked = [item for item in references if last.get(keys[item]) != item[1]]
            answers = {keys[item]: commit for item, commit in (ask(asked) if asked else {}).items()}
            if len(answers) < len(asked):
                _log.warning("not every git repository reports its commits; the last known ones are used")
            of_run = {**last, **answers}
            of_runs.add(run, of_run)
    return _with_commits(declared, lambda *reference: of_run.get(keys[reference]))


def commits(references: Sequence[Reference]) -> dict[Reference, str]:
    """Return the commits of references. References of a repository that cannot be reached are left out.

    A short commit is returned as it is.
    """
    result = {}
    for url, reference in references:
        # The commit of an annotated tag takes precedence over the tag object.
        names = [f"{reference}^{{}}", reference]
        if not reference.startswith(("refs/", "HEAD")):
            names = [f"refs/heads/{reference}", *(f"refs/tags/{name}" for name in names)]
        with suppress(OSError, subprocess.SubprocessError):
            answer = subprocess.run(
                ["git", "ls-remote", "--", url, *names],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "GIT_TERMINAL_PROMPT": "0"},
                text=True,
                check=True,
                timeout=_ASK_S,
            ).stdout
            lines = [line.split("\t") for line in answer.splitlines()]
            commits = {name: commit for commit, name in lines}
            short = reference if _SHORT_COMMIT.fullmatch(reference) else None
            if commit := next((commits[name] for name in names if name in commits), short):
                result[url, reference] = commit
    return result


def _references(declared: Mapping[str, Any]) -> list[Reference]:
    """Return the branches, tags and default branches of git sources, without duplicates."""
    result: dict[Reference, None] = {}

    def note(url: str, reference: str) -> None:
        result[url, reference] = None

    _with_commits(declared, note)
    return list(result)


def _with_commits(
    declared: Mapping[str, Any], commit_of: Callable[[str, str], str | None]
) -> Mapping[str, Any]:
    """Return a pyproject.toml in which commits replace the references of git sources.

    ``commit_of``: returns the commit for a URL and a reference. None keeps the reference.
    """
    project, settings = declared["project"], declared["tool"]["uv"]
    sources = {
        name: [_source(item, commit_of) for item in source]
        if isinstance(source, list)
        else _source(source, commit_of)
        for name, source in settings.get("sources", {}).items()
    }
    needed = [_requirement(text, commit_of) for text in project["dependencies"]]
    return {
        **declared,
        "project": {**project, "dependencies": needed},
        "tool": {"uv": {**settings, **({"sources": sources} if sources else {})}},
    }


def _source(source: Mapping[str, Any], commit_of: Callable[[str, str], str | None]) -> Mapping[str, Any]:
    """Return an entry of ``[tool.uv.sources]`` in which the commit replaces the reference."""
    if "git" not in source:
        return source
    reference = source.get("rev", "HEAD")
    if "branch" in source:
        reference = f"refs/heads/{source['branch']}"
    elif "tag" in source:
        reference = f"refs/tags/{source['tag']}"
    if _COMMIT.fullmatch(reference) or (commit := commit_of(source["git"], reference)) is None:
        return source
    rest = {key: value for key, value in source.items() if key not in ("branch", "tag", "rev")}
    return {**rest, "rev": commit}


def _requirement(text: str, commit_of: Callable[[str, str], str | None]) -> str:
    """Return a requirement, such as ``name @ git+https://host/path@branch``, with the commit in it."""
    needed = requirement(text)
    if needed.url is None or not needed.url.startswith(_GIT):
        return text
    url = urlsplit(needed.url.removeprefix(_GIT))
    path, _, reference = url.path.rpartition("@")
    if not path:  # without a reference
        path, reference = url.path, "HEAD"
    repository = url._replace(path=path, fragment="").geturl()
    if _COMMIT.fullmatch(reference) or (commit := commit_of(repository, reference)) is None:
        return text
    needed.url = _GIT + url._replace(path=f"{path}@{commit}").geturl()
    return str(needed)
