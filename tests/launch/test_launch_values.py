"""Run config values on command lines: ours are read by Flower as they were meant."""

from __future__ import annotations

import pytest
from flwr.common.config import parse_config_args
from hypothesis import given
from hypothesis import strategies as st

from flower_gpu.apps.app import flatten, format_pairs, parse_pairs
from flower_gpu.errors import ConfigError

KEYS = st.from_regex(r"[a-z][a-z0-9-]{0,8}", fullmatch=True)
# TOML knows no lone surrogates, and its integers have 64 bits.
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
VALUES = st.one_of(st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False), TEXTS)


@given(st.dictionaries(KEYS, VALUES, min_size=1, max_size=4))
def test_flower_reads_what_we_write(values: dict[str, object]) -> None:
    read = parse_config_args([format_pairs(values)])
    assert read == values
    assert [type(read[key]) for key in values] == [type(value) for value in values.values()]


@given(st.dictionaries(KEYS, VALUES, min_size=1, max_size=4))
def test_we_read_what_we_write(values: dict[str, object]) -> None:
    assert parse_pairs("--run-config", [format_pairs(values)]) == values


@pytest.mark.parametrize(
    ("texts", "values"),
    [
        (['a=1 b=true c="x y" d=0.5'], {"a": 1, "b": True, "c": "x y", "d": 0.5}),
        (["a=1", "a=2  b='z'"], {"a": 2, "b": "z"}),
        (["a.b=1"], {"a.b": 1}),
        ([r'a="say \"hi\""'], {"a": 'say "hi"'}),
        (["a='C:\\x'"], {"a": "C:\\x"}),
        (["a=-1 b=1e-3 c=0x10"], {"a": -1, "b": 0.001, "c": 16}),
        ([], {}),
    ],
)
def test_pairs(texts: list[str], values: dict[str, object]) -> None:
    assert parse_pairs("--run-config", texts) == values


@pytest.mark.parametrize(
    "text",
    ["", "a", "a=", "=1", "a = 1", "a=x", "a='b", 'a="b"c', "a=[1]", "a={b=1}x", "a=1 b", "a=1979-05-27"],
)
def test_what_is_no_pair(text: str) -> None:
    with pytest.raises(ConfigError, match="--run-config"):
        parse_pairs("--run-config", [text])


def test_nested_tables_are_joined_as_in_flower() -> None:
    assert flatten({"a": {"b": {"c": 1}}, "d": "x"}) == {"a.b.c": 1, "d": "x"}
