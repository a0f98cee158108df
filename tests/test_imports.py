"""What importing a module brings in, and which layers know of each other."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import flower_gpu

pytestmark = pytest.mark.timeout(120)

PACKAGE = Path(flower_gpu.__file__).parent

#: Imports each module in a child of its own. What all of a layer may import is there already in its parent.
IMPORT = """
import importlib, json, os, sys
there, *names = sys.argv[1:]
if there:
    importlib.import_module(there)
for name in names:
    child = os.fork()
    if not child:
        try:
            importlib.import_module(name)
            looked_for = ("torch", "flwr", "numpy", "tqdm", "rich", "tensorflow", "keras", "jax")
            found = [name for name in looked_for if name in sys.modules]
            print(json.dumps([name, found]), flush=True)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, name
"""
THERE = {"pytorch": "torch", **dict.fromkeys(("flower", "launch", "simulation"), "flwr")}


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def run_python(code: str, *arguments: str) -> str:
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def brought_in() -> dict[str, set[str]]:
    """What each module imports, in a process of its own."""
    brought_in = {}
    for there in ("", *dict.fromkeys(THERE.values())):
        names = [name for name in FILES if THERE.get(layer(name), "") == there]
        for line in run_python(IMPORT, there, *names).splitlines():
            name, found = json.loads(line)
            brought_in[name] = set(found)
    assert brought_in.keys() == FILES.keys()
    return brought_in


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
    light = ("config", "control_group", "errors", "trace", "isolation", "gpu", "calls", "ranks", "runner")
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
    "control_group": set(),
    "config": {"control_group", "errors", "printable"},
    "printable": set(),
    "trace": {"config", "errors"},
    "isolation": {"config", "control_group", "errors", "trace"},
    "gpu": {"config", "errors", "trace"},
    "rank_settings": {"config", "errors"},
    "pytorch": {"config", "errors", "trace", "array_checks", "rank_settings"},
    "array_checks": {"errors"},
    "tensorflow": set(),
    "keras": {"errors", "array_checks"},
    "jax": {"errors", "array_checks"},
    "progress_display": {"config", "errors", "trace"},
    "calls": {"config", "errors", "trace", "isolation", "gpu", "pytorch", "tensorflow"},
    "runner": {"config", "errors", "trace", "isolation", "gpu", "calls", "progress_display"},
    # PyTorch in a rank only; Flower's messages by name only.
    "ranks": {"config", "errors", "trace", "rank_settings", "isolation", "gpu", "calls", "pytorch"},
    # Its small start calls Flower's code only where there is no fork server for that.
    "supernode": {"config", "errors", "printable", "isolation", "flower"},
    "run": {"config", "errors", "printable", "trace", "gpu"},
    "simulation": {
        "config",
        "control_group",
        "errors",
        "printable",
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
