"""A framework is one class in the registry, and all other code asks the registry."""

from __future__ import annotations

import sys
from collections.abc import Container, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from flower_gpu import frameworks
from flower_gpu.frameworks import Cap, Framework, Hold, Rule, jax, out_of_memory, pytorch, tensorflow
from flower_gpu.frameworks.framework import Setting
from flower_gpu.simulation import determinism
from flower_gpu.simulation.in_worker import ProcessState, seed_all
from flower_gpu.strategies.rounds import capture_random_state, restore_random_state


class Toy(Framework):
    """A new framework that implements every method."""

    name, module, last, native = "Toy", "toy_framework", "ready", "toy_framework"
    read_by_native = ("TOY_LOGGING",)
    comes_after = "toy_base"
    set_by_modules = ("TOY_CAP",)

    def __init__(self) -> None:
        self.held: list[tuple[list[Cap], bool]] = []
        self.seeds: list[int | None] = []

    def says_out_of_memory(self, error: BaseException, text: str) -> bool:
        return text == "the toy box is full"

    def has_threads(self) -> bool:
        return getattr(sys.modules.get(self.module), "threads", 0) > 0

    def cap_variables(self, fraction: str, environ: Mapping[str, str]) -> dict[str, str]:
        return {"TOY_CAP": fraction}

    def cap_rules(self, fraction: str, fixed: Container[str]) -> dict[str, Rule]:
        return {"TOY_CAP": lambda text: min(text, fraction)}

    def hold(self, caps: Sequence[Cap], *, is_new: bool) -> Hold:
        self.held.append((list(caps), is_new))
        held = self.held

        class ToyHold(Hold):
            def release(self) -> None:
                held.clear()

        return ToyHold()

    def seed(self, seed: int) -> None:
        self.seeds.append(seed)

    def seed_fork(self) -> None:
        self.seeds.append(None)

    def deterministic_variables(self, threads: int, environ: Mapping[str, str]) -> dict[str, str]:
        return {"TOY_THREADS": environ.get("TOY_THREADS", str(threads))}

    def be_deterministic(self) -> None:
        self.seeds.append(-1)

    def not_deterministic(self, text: str) -> str | None:
        return "Toy's dice" if "the dice" in text else None

    def random_state(self) -> bytes:
        return repr(self.seeds).encode()

    def set_random_state(self, state: bytes) -> None:
        self.seeds = [int(number) for number in state.decode().strip("[]").split(",")]

    def settings(self) -> Iterator[Setting]:
        toy = sys.modules[self.module]
        yield Setting(lambda: toy.flag, lambda value: setattr(toy, "flag", value))


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Toy]:
    (tmp_path / "toy_framework.py").write_text("flag = 1\nthreads = 0\nready = True\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    toy = Toy()
    # The only framework in the registry: holding PyTorch would leave its settings in this process's
    # environment.
    monkeypatch.setattr(frameworks, "ALL", (toy,))
    monkeypatch.setattr(out_of_memory, "ALL", frameworks.ALL)
    yield toy
    sys.modules.pop("toy_framework", None)


def test_a_new_framework_is_used_everywhere(toy: Toy) -> None:
    caps = [Cap(4, 16)]
    assert frameworks.environment(caps, {})["TOY_CAP"] == "0.250000000000"
    assert frameworks.rules(caps, ())["TOY_CAP"]("0.9") == "0.250000000000"
    assert "TOY_LOGGING" in frameworks.read_at_import({"toy_framework"})
    assert frameworks.comes_before("toy_framework") == "toy_base"
    assert "TOY_CAP" in frameworks.set_by_modules()
    assert out_of_memory.out_of_memory_in(ValueError("the toy box is full"))
    assert frameworks.deterministic_variables(2, {"TOY_THREADS": "3"}) == {"TOY_THREADS": "3"}
    assert frameworks.not_deterministic("ValueError: the dice are thrown") == "Toy's dice"
    assert frameworks.not_deterministic("ValueError: of the app") is None
    assert toy not in frameworks.loaded()

    module: Any = import_module("toy_framework")
    assert toy in frameworks.loaded()
    seed_all(7)
    frameworks.seed_fork()
    assert toy.seeds == [7, None]
    toy.seeds = [1, 2]
    state = capture_random_state()
    toy.seeds = []
    restore_random_state(state)
    assert toy.seeds == [1, 2]
    process_state = ProcessState()
    module.flag = 2
    process_state.restore()
    assert module.flag == 1
    assert frameworks.with_threads() is None
    module.threads = 3
    assert frameworks.with_threads() == "Toy"


@pytest.mark.parametrize("is_new", [False, True], ids=["imported-before", "imported-in-the-block"])
def test_a_framework_is_held_in_a_block_whenever_it_is_imported(toy: Toy, is_new: bool) -> None:
    if not is_new:
        import_module("toy_framework")
    with frameworks.held_to([Cap(4, 16)]):
        assert bool(toy.held) is not is_new
        import_module("toy_framework")
        assert toy.held == [([Cap(4, 16)], is_new)]
    assert toy.held == []
    sys.modules.pop("toy_framework")
    import_module("toy_framework")
    assert toy.held == [], "an import after the block holds nothing"


@pytest.mark.parametrize("is_new", [False, True], ids=["imported-before", "imported-in-the-block"])
def test_a_run_is_deterministic_whenever_a_framework_is_imported(toy: Toy, is_new: bool) -> None:
    if not is_new:
        import_module("toy_framework")
    with determinism.applied({}):
        assert bool(toy.seeds) is not is_new
        module: Any = import_module("toy_framework")
        assert toy.seeds == [-1]
        module.flag = 5
    # Settings are restored only if the framework was imported before the block.
    assert module.flag == (5 if is_new else 1)


def test_harmless_variables_of_users_are_kept_in_a_deterministic_run() -> None:
    def variables(kind: type[Framework], **environ: str) -> dict[str, str]:
        return kind().deterministic_variables(2, environ)

    name = "CUBLAS_WORKSPACE_CONFIG"
    values = [variables(pytorch.PyTorch, **{name: value})[name] for value in ("", ":16:8", ":0:0")]
    assert values == [":4096:8", ":16:8", ":4096:8"]
    assert variables(tensorflow.TensorFlow, TF_NUM_INTRAOP_THREADS="3") == {
        "TF_NUM_INTRAOP_THREADS": "3",
        "TF_NUM_INTEROP_THREADS": "2",
    }
    assert determinism.variables({"MKL_NUM_THREADS": "7"})["MKL_NUM_THREADS"] == "1"
    assert (
        determinism.variables({"MKL_NUM_THREADS": "7", "OMP_NUM_THREADS": "2"}, 5)["MKL_NUM_THREADS"] == "2"
    )
    assert determinism.variables({}, 5)["OMP_NUM_THREADS"] == "5"
    flag = "--xla_gpu_deterministic_ops=true"
    assert variables(jax.JAX, XLA_FLAGS="--xla_dump_to=/tmp") == {"XLA_FLAGS": f"--xla_dump_to=/tmp {flag}"}
    assert variables(jax.JAX, XLA_FLAGS=flag) == {"XLA_FLAGS": flag}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "RuntimeError: put_ does not have a deterministic implementation, but you set",
            "PyTorch's put_ has no deterministic implementation on this device",
        ),
        (
            "RuntimeError: Deterministic behavior was enabled with either ..., but this operation is not "
            "deterministic because it uses CuBLAS and you have CUDA >= 10.2.",
            "cuBLAS has no deterministic workspace",
        ),
        (
            "ValueError: tf.image.x requires a non-zero seed to be passed in when determinism is enabled",
            "TensorFlow: ValueError: tf.image.x requires a non-zero seed to be passed in when determinism is "
            "enabled",
        ),
        ("RuntimeError: the loss is nan", None),
    ],
)
def test_operations_without_a_deterministic_algorithm_are_named(text: str, expected: str | None) -> None:
    assert frameworks.not_deterministic(text) == expected
