"""What importing a module brings in, and which layers know of each other."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import flower_gpu

pytestmark = pytest.mark.timeout(120)

PACKAGE = Path(flower_gpu.__file__).parent

IMPORT = """
import json, sys
import {module}
names = ("torch", "flwr", "numpy", "tqdm", "rich", "tensorflow", "keras", "jax")
print(json.dumps([name for name in names if name in sys.modules]))
"""


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def brought_in() -> dict[str, set[str]]:
    """What each module imports, in an interpreter of its own."""
    with ThreadPoolExecutor(4) as pool:
        outputs = pool.map(lambda name: run_python(IMPORT.format(module=name)), FILES)
        return {name: set(json.loads(text)) for name, text in zip(FILES, outputs, strict=True)}


def layer(name: str) -> str:
    """Return the subpackage of a module, or the module itself where it is at the top."""
    return name.split(".")[1] if "." in name else ""


@pytest.mark.parametrize("name", FILES)
def test_import(name: str, brought_in: dict[str, set[str]]) -> None:
    found = brought_in[name]
    if layer(name) != "pytorch":
        assert "torch" not in found
    if layer(name) not in ("flower", "launch", "simulation"):
        assert "flwr" not in found
    assert not found & {"tensorflow", "keras", "jax"}  # optional: imported by what a task calls only
    light = ("config", "errors", "trace", "isolation", "gpu", "calls", "runner")
    if name == "flower_gpu" or layer(name) in light:
        assert found == set()  # a worker's and a client's minimum, and what every other module builds on


def imports_of(path: Path) -> set[str]:
    """Return every module that a file imports, also inside of functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            found |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


#: For each layer, what of the package it may import besides itself. Imports point down only.
MAY_IMPORT = {
    "errors": set(),
    "config": {"errors"},
    "printable": set(),
    "trace": {"config", "errors"},
    "isolation": {"config", "errors", "trace"},
    "gpu": {"config", "errors", "trace"},
    "pytorch": {"config", "errors", "trace"},
    "array_checks": {"errors"},
    "tensorflow": set(),
    "keras": {"errors", "array_checks"},
    "jax": {"errors", "array_checks"},
    "progress_display": {"config", "errors", "trace"},
    "calls": {"config", "errors", "trace", "isolation", "gpu", "pytorch", "tensorflow"},
    "runner": {"config", "errors", "trace", "isolation", "gpu", "calls", "progress_display"},
    # Its small start calls Flower's code only where there is no fork server for that.
    "supernode": {"config", "errors", "isolation", "flower"},
    "run": {"config", "errors", "trace", "gpu"},
    "simulation": {
        "config",
        "errors",
        "trace",
        "isolation",
        "gpu",
        "calls",
        "runner",
        "run",
        "flower",
        "launch",
    },
    # Reads only: what it shows must not depend on who writes it.
    "monitor": {"config", "errors", "printable", "trace", "gpu", "run"},
}


@pytest.mark.parametrize("name", [name for name in FILES if layer(name) in MAY_IMPORT])
def test_layers(name: str) -> None:
    allowed = MAY_IMPORT[layer(name)] | {layer(name)}
    ours = {imported for imported in imports_of(FILES[name]) if imported.split(".")[0] == "flower_gpu"}
    forbidden = {imported for imported in ours if layer(imported) not in allowed | {""}}
    assert forbidden == set()


@pytest.mark.parametrize("library", ["flwr", "pynvml"])
def test_library_is_imported_in_one_place(library: str) -> None:
    """Flower by the layers for Flower only, NVIDIA's library by one file."""
    users = {
        name
        for name, path in FILES.items()
        if any(imported.split(".")[0] == library for imported in imports_of(path))
    }
    if library == "flwr":
        assert {layer(name) for name in users} <= {"flower", "launch", "simulation"}
    else:
        assert users <= {"flower_gpu.gpu.nvml"}


def test_building_a_client_imports_no_torch() -> None:
    code = """
import sys
import flower_gpu
client = flower_gpu.GPUClient("nowhere.task:train", "nowhere.task:test", initial_weights="nowhere.task:init")
client.to_client()
flower_gpu.gpu_client("nowhere.client:FlowerClient", 1, name="2")
flower_gpu.gpu_evaluate("nowhere.task:evaluate")
print([name for name in ("torch", "nowhere") if name in sys.modules])
"""
    assert run_python(code) == "[]\n"


def test_a_call_brings_nothing_in() -> None:
    """Neither starting workers nor their results load a library that the caller did not ask for."""
    code = """
import sys
import flower_gpu
for method in ("spawn", "fork"):
    assert flower_gpu.run_in_worker("math:sqrt", 4.0, start_method=method) == 2.0
print([name for name in ("torch", "flwr", "numpy", "tqdm", "rich") if name in sys.modules])
"""
    assert run_python(code) == "[]\n"


def test_a_worker_starts_with_the_standard_library_only() -> None:
    """The environment is set before anything heavy is imported: that is what setup= and env= rely on."""
    code = """
import flower_gpu
def libraries():
    import sys
    return [name for name in ("torch", "flwr", "numpy", "tqdm", "rich") if name in sys.modules]
print(flower_gpu.run_in_worker(libraries, start_method="spawn"))
"""
    assert run_python(code) == "[]\n"


def test_public_names_exist() -> None:
    assert sorted(flower_gpu.__all__) == flower_gpu.__all__
    for name in flower_gpu.__all__:
        assert getattr(flower_gpu, name) is not None
    assert set(flower_gpu.__all__) <= set(dir(flower_gpu))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = flower_gpu.nothing
