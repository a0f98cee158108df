"""Which changes of packages from folders and from git are noticed."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import run_programs

from flower_gpu.programs import package_content, package_sources
from flower_gpu.programs.package_sources import Reference


def test_the_digest_of_a_folder_follows_links_to_folders(tmp_path: Path) -> None:
    package, shared = tmp_path / "package", tmp_path / "shared"
    package.mkdir()
    shared.mkdir()
    (package / "src").symlink_to(shared)
    for name in "abc":  # circular links, of which the kernel follows 40 in a row
        (shared / name).symlink_to(package)
    digest_before = package_content.digest(package)
    (shared / "module.py").touch()
    digest_after = package_content.digest(package)
    assert digest_after != digest_before and package_content.digest(package) == digest_after


def test_the_digest_of_a_folder_does_not_read_pipes(tmp_path: Path) -> None:
    digest_before = package_content.digest(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    assert package_content.digest(tmp_path) != digest_before


def test_packages_named_like_build_folders_change_the_digest(tmp_path: Path) -> None:
    digests = [package_content.digest(tmp_path)]
    for file in ("build/lib/module.py", "dist/__init__.py", "dist/module.py"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
        digests.append(package_content.digest(tmp_path))
    assert digests[0] == digests[1] and len(set(digests[1:])) == 3


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_files_that_no_build_reads_do_not_change_the_digest(tmp_path: Path) -> None:
    package = tmp_path / "repository" / "package"
    (tmp_path / "repository" / ".git").mkdir(parents=True)
    write(tmp_path / "repository", **{".gitignore": "*.npz\n"})
    write(package, **{".gitignore": "/data/*\n!/data/labels.csv\n", "pyproject.toml": "", "src/thing.py": ""})
    write(package / "src", **{".gitignore": "scratch/\n"})
    digest_before = package_content.digest(package)
    for name in (
        "training.log",
        "src/training.log.1",
        "src/__pycache__/thing.cpython-311.pyc",
        "build/lib/thing.py",
        "thing.egg-info/PKG-INFO",
        ".mypy_cache/a.json",
        ".hg/index",
        "src/weights.npz",
        "data/images.bin",
        "src/scratch/notes.txt",
    ):
        write(package, **{name: "new"})
    write(package / "hub", **{"CACHEDIR.TAG": "Signature: 8a477f597d28d172789f06886806bc55", "model": "new"})
    assert package_content.digest(package) == digest_before
    digests = {digest_before}
    for name in ("src/thing.py", "src/new.py", "data/labels.csv", "src/data/table.csv", "src/build/part.py"):
        write(package, **{name: "new"})
        digests.add(package_content.digest(package))
    assert len(digests) == 6


@pytest.mark.parametrize("folder", ["", "package/"])
@pytest.mark.parametrize("rule", ["*", "package/"])
def test_ignore_rules_that_exclude_the_whole_package_hide_no_change(
    rule: str, folder: str, tmp_path: Path
) -> None:
    """A repository may ignore a folder of checkouts of other packages."""
    (tmp_path / ".git").mkdir()
    write(tmp_path, **{f"{folder}.gitignore": f"{rule}\n", "package/pyproject.toml": ""})
    digest_before = package_content.digest(tmp_path / "package")
    write(tmp_path / "package", **{"thing.py": ""})
    assert package_content.digest(tmp_path / "package") != digest_before


def test_a_short_hash_is_a_commit_unless_a_branch_has_that_name(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
        return run_programs.run(["git", *identity, *arguments], cwd=tmp_path, check=True).stdout.strip()

    git("init", "--initial-branch=main")
    git("commit", "--allow-empty", "-m", "first")
    git("branch", "0123abc")
    full_hash = git("rev-parse", "HEAD")
    requested: list[str] = []

    def ask(references: Sequence[Reference]) -> Mapping[Reference, str]:
        requested.extend(reference for _, reference in references)
        return package_sources.commits(references)

    def pinned(revision: str, run: int) -> Any:
        source = {"git": tmp_path.as_uri(), "rev": revision}
        declared = {"project": {"dependencies": []}, "tool": {"uv": {"sources": {"thing": source}}}}
        return package_sources.pinned(declared, tmp_path, run, ask)["tool"]["uv"]["sources"]["thing"]["rev"]

    short_hash = full_hash[:8]
    assert [pinned(short_hash, run) for run in (1, 2, 3)] == [short_hash] * 3
    assert requested == [short_hash], "a commit never changes"
    assert [pinned("0123abc", run) for run in (1, 2)] == [full_hash] * 2
    assert requested == [short_hash, "0123abc", "0123abc"]
    assert pinned(full_hash, 1) == full_hash and len(requested) == 3
