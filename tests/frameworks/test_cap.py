"""Environment variables that make frameworks keep to caps. These tests merge settings without processes."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flower_gpu import frameworks
from flower_gpu.errors import ConfigError
from flower_gpu.frameworks import Cap, fraction_of, pytorch, pytorch_memory

GIB = 2**30
KEY = "per_process_memory_fraction"


QUARTER = [Cap(4 * GIB, 16 * GIB)]


@pytest.fixture(autouse=True)
def _pytorch_that_reads_its_cap_from_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pytorch, "installed_version", lambda: "2.10.0")


def fraction_in(settings: str) -> str:
    """Return the cap in PyTorch's settings. The last value counts."""
    return [entry.partition(":")[2] for entry in settings.split(",") if entry.startswith(KEY)][-1]


def test_tensorflow_and_jax_grow_up_to_the_cap() -> None:
    variables = frameworks.environment(QUARTER, {})
    assert variables["TF_FORCE_GPU_ALLOW_GROWTH"] == "true"
    assert variables["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
    assert float(variables["XLA_PYTHON_CLIENT_MEM_FRACTION"]) == 0.25


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.250000000000"}),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": ".1"}, {"XLA_PYTHON_CLIENT_MEM_FRACTION": ".1"}),
        ({"XLA_CLIENT_MEM_FRACTION": ".1"}, {"XLA_CLIENT_MEM_FRACTION": ".1"}),
        ({"XLA_CLIENT_MEM_FRACTION": "1.5"}, {"XLA_CLIENT_MEM_FRACTION": "0.250000000000"}),
        ({"XLA_CLIENT_MEM_FRACTION": ""}, {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.250000000000"}),
    ],
)
def test_the_cap_of_jax_has_only_one_name(environ: dict[str, str], expected: dict[str, str]) -> None:
    """JAX does not start if both names are set."""
    variables = frameworks.environment(QUARTER, environ)
    assert {name: value for name, value in variables.items() if "MEM_FRACTION" in name} == expected


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"PYTORCH_ALLOC_CONF": f" {KEY} : 0.5 ,max_split_size_mb:64"}, None),
        (
            {"PYTORCH_ALLOC_CONF": "roundup_power2_divisions:[256:1,512:2,>:8],"},
            f"roundup_power2_divisions:[256:1,512:2,>:8],{KEY}:0.250000000000",
        ),
        (
            {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64", "PYTORCH_CUDA_ALLOC_CONF": "backend:native"},
            f"backend:native,{KEY}:0.250000000000",
        ),
        # The old name overrides the new one even if it is empty.
        (
            {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64", "PYTORCH_CUDA_ALLOC_CONF": ""},
            f"{KEY}:0.250000000000",
        ),
        # This backend gets its cap when CUDA starts, and would warn about this setting.
        ({"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"}, "backend:cudaMallocAsync"),
    ],
)
def test_the_cap_is_added_to_the_users_settings(environ: dict[str, str], expected: str | None) -> None:
    variables = frameworks.environment(QUARTER, environ)
    expected = expected or f"max_split_size_mb:64,{KEY}:0.250000000000"
    assert variables["PYTORCH_ALLOC_CONF"] == expected
    # The old name is not added, because PyTorch 2.9 to 2.14 warn about it.
    assert variables.get("PYTORCH_CUDA_ALLOC_CONF") == (
        expected if "PYTORCH_CUDA_ALLOC_CONF" in environ else None
    )


@pytest.mark.parametrize("value", ["half", "-0.1", "1.5", "nan", ""])
def test_the_error_for_an_invalid_cap_names_the_variable(value: str) -> None:
    with pytest.raises(ConfigError, match="PYTORCH_CUDA_ALLOC_CONF: the memory fraction"):
        frameworks.environment(QUARTER, {"PYTORCH_CUDA_ALLOC_CONF": f"{KEY}:{value}"})


def test_an_older_pytorch_does_not_get_a_setting_that_it_would_refuse(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    user = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}
    monkeypatch.setattr(pytorch, "installed_version", lambda: "2.9.1")
    variables = frameworks.environment(QUARTER, user)
    assert not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & variables.keys()


@pytest.mark.parametrize(
    ("version", "is_supported"),
    [
        ("2.4.1+cu121", False),
        ("2.9.1", False),
        ("2.10.0a0+git1234", False),
        ("2.10.0.dev20251001+cu130", False),
        ("2.10.0rc1", False),
        ("2.10.0+cu128", True),
        ("2.11.0.dev20260101", True),
        ("2.15.0+cu132", True),
        ("3.0", True),
        ("unknown", False),
    ],
)
def test_pytorch_reads_its_cap_from_the_environment_since_2_10(version: str, is_supported: bool) -> None:
    assert pytorch_memory.knows_fraction(version) is is_supported


def test_the_smallest_fraction_of_several_gpus_counts() -> None:
    assert fraction_of([Cap(8 * GIB, 16 * GIB), Cap(6 * GIB, 24 * GIB)]) == "0.250000000000"


totals = st.integers(2**20, 2**40)
texts = st.lists(
    st.sampled_from(
        ["expandable_segments:True", "max_split_size_mb:64", "roundup_power2_divisions:[256:1,>:8]", " ", ""]
    )
    | st.floats(0, 1).map(lambda value: f"{KEY}:{value!r}")
).map(",".join)
environments = st.dictionaries(
    st.sampled_from(["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"]), texts, max_size=2
)


@given(total=totals, part=st.floats(-0.1, 1.2))
def test_a_fraction_allows_at_most_the_cap_and_hardly_less(total: int, part: float) -> None:
    cap_bytes = int(total * part)
    text = fraction_of([Cap(cap_bytes, total)])
    assert "e" not in text
    assert 0 <= float(text) <= 1
    limit = min(max(cap_bytes, 0), total)
    assert int(float(text) * total) <= limit
    assert Fraction(text) * total > limit - 2


@given(total=totals, part=st.floats(0, 1), environ=environments)
def test_merging_keeps_the_settings_and_the_smaller_cap_and_is_idempotent(
    total: int, part: float, environ: dict[str, str]
) -> None:
    granted = [Cap(int(total * part), total)]
    fraction = fraction_of(granted)
    cap_fraction = float(fraction)
    once = frameworks.environment(granted, environ)
    settings = once["PYTORCH_ALLOC_CONF"]
    user = environ.get("PYTORCH_CUDA_ALLOC_CONF", environ.get("PYTORCH_ALLOC_CONF", ""))
    user_fractions = [float(entry.partition(":")[2]) for entry in user.split(",") if entry.startswith(KEY)]
    assert float(fraction_in(settings)) == min([cap_fraction, *user_fractions[-1:]])
    assert settings.count(KEY) == 1
    for entry in ("expandable_segments:True", "max_split_size_mb:64", "roundup_power2_divisions:[256:1,>:8]"):
        assert settings.count(entry) == user.count(entry)
    assert frameworks.environment(granted, {**environ, **once}) == once
    # A smaller fraction set by the user is recognised before and after merging.
    expected = user_fractions[-1] if user_fractions and user_fractions[-1] < cap_fraction else None
    assert pytorch_memory.users_fraction(fraction, environ) == expected
    assert pytorch_memory.users_fraction(fraction, {**environ, **once}) == expected
