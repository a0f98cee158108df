"""Options that `flower-gpu launch` accepts, and the one-line errors for those that it refuses."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from flwr.common.config import parse_config_args
from hypothesis import given
from hypothesis import strategies as st
from launch_helpers import plan_of
from run_programs import run

from flower_gpu.apps.app import flatten, format_pairs, parse_pairs
from flower_gpu.cli import main as cli
from flower_gpu.errors import ConfigError
from flower_gpu.launch.options import RUN_CONFIG
from flower_gpu.options import flag
from flower_gpu.programs import commands

BAD_OPTIONS = [
    # Arguments after the app's folder, and words that the error line must contain.
    ("--clients 0", "--clients 1 or more"),
    ("--clients two", "--clients 'two' whole number"),
    ("--rounds 0", "--rounds 1 or more"),
    ("--clients-per-round 0", "--clients-per-round 1 or more"),
    ("--clients-per-round 3", "--clients-per-round 3 more than --clients 2"),
    ("--learning-rate 0", "--learning-rate above 0"),
    ("--learning-rate fast", "--learning-rate 'fast' number"),
    ("--seed -1", "--seed 0 or more"),
    ("--timeout-s 0", "--timeout-s above 0"),
    ("--start-method thread", "--start-method 'thread' spawn fork"),
    ("--partition label", "--partition 'label' iid dirichlet"),
    ("--dirichlet-alpha 0.1", "--dirichlet-alpha --partition dirichlet iid"),
    ("--dataset three", "--dataset three tiny takes only one two"),
    ("--run-config dataset='three'", "--run-config dataset three one two"),
    ("--model cnn", "--model key model tiny num-server-rounds"),
    ("--batch-size 32", "--batch-size batch-size tiny learning-rate"),
    ("--run-config unknown=1", "--run-config unknown tiny num-server-rounds"),
    ("--run-config learning-rate", "--run-config 'learning-rate' key=value"),
    ("--run-config text=abc", "--run-config text=abc quoted"),
    ("--run-config num-clients=5", "--run-config num-clients=5 there are 2 clients"),
    ("--rounds 2 --run-config num-server-rounds=2", "--rounds --run-config twice"),
    ("--node-config partition-id=1", "--node-config partition-id launcher"),
    ("--gpu-ids 0,,1", "--gpu-ids empty entry"),
    ("--gpu-ids first", "--gpu-ids 'first' number UUID nvidia-smi"),
    ("--gpu force --node-config gpu='never'", "--gpu --node-config gpu twice"),
    ("--gpu-ids 0 --node-config gpu-ids=1", "--gpu-ids --node-config gpu-ids twice"),
    ("--node-config gpu='sometimes'", "gpu node config 'sometimes' never offer force require"),
    ("--node-config gpu-ids=1.5", "gpu-ids node config number float"),
    ("--num-gpus 0", "--num-gpus share policy never"),
    ("--gpu-memory 4", "--gpu-memory 4 bytes 4GiB"),
    ("--num-gpus 0.5 --gpu-memory 4GiB", "--num-gpus --gpu-memory not allowed"),
    ("--use-gpu true", "--use-gpu tiny use-gpu = true [tool.flwr.app.config] pyproject.toml context=context"),
    ("--use-gpu yes", "--use-gpu true or false 'yes'"),
    ("--run-config use-gpu=true", "--run-config use-gpu tiny pyproject.toml context=context"),
    ("--round 3", "unknown: --round 3; did you mean --rounds? flower-gpu launch --help"),
    ("another", "unknown: another"),
    ("-v -q", "-q -v"),
    ("--log-dir pyproject.toml/x", "--log-dir not a folder"),
]


def run_main(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    try:
        code = cli.main(arguments)
    except SystemExit as end:
        code = int(end.code or 0)
    out, err = capsys.readouterr()
    return code, out, err


def is_one_line_with(err: str, words: str) -> bool:
    return err.count("\n") == 1 and err.endswith("\n") and all(w in err for w in words.split())


@pytest.mark.parametrize(("arguments", "words"), BAD_OPTIONS)
def test_bad_option_is_one_line_and_leaves_nothing(
    arguments: str,
    words: str,
    tiny_app: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tiny_app)
    before = sorted(tiny_app.rglob("*"))
    code, out, err = run_main(["launch", ".", *arguments.split()], capsys)
    assert (code, out) == (2, "")
    assert is_one_line_with(err, words), err
    assert sorted(tiny_app.rglob("*")) == before


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (shutil.rmtree, "tiny_app not a folder"),
        (lambda app: (app / "pyproject.toml").unlink(), "no pyproject.toml"),
        (lambda app: (app / "pyproject.toml").write_text("[project"), "cannot be read"),
        (lambda app: (app / "pyproject.toml").write_text("[project]\nname='x'"), "not a Flower app"),
        (
            lambda app: replace(app / "pyproject.toml", 'text = ""', "text = [1, 2]"),
            "run config text list",
        ),
        (
            lambda app: replace(app / "pyproject.toml", "clients-per-round = 0", "clients-per-round = 9"),
            "--clients-per-round 9 default of tiny --clients 2",
        ),
    ],
)
def test_bad_app_is_one_line(change, words: str, tiny_app: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(tiny_app)
    log_dir = tiny_app.parent / "runs"
    code, out, err = run_main(["launch", str(tiny_app), "--log-dir", str(log_dir)], capsys)
    assert (code, out) == (2, "")
    assert is_one_line_with(err, words), err
    assert not log_dir.exists()


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_missing_flower_commands_are_reported_in_one_line(
    tiny_app: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tiny_app))
    monkeypatch.setattr(commands, "flowers", dict)
    monkeypatch.setattr(commands, "script_folders", list)
    code, _, err = run_main(["launch", str(tiny_app)], capsys)
    assert code == 2
    assert is_one_line_with(err, "flower-superlink not installed pip install flwr")


def test_a_declared_package_that_is_missing_is_named_unless_flower_installs_it(
    tiny_app: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pyproject, server = tiny_app / "pyproject.toml", tiny_app / "tiny/server_app.py"
    pyproject.write_text(pyproject.read_text().replace('["flwr"]', '["flwr", "absent-one"]'))
    server.write_text(f"import absent_module\n{server.read_text()}")
    note = "note: tiny declares absent-one, which is not installed: pip install absent-one"
    assert note in plan_of(tiny_app, "").remarks
    monkeypatch.setenv("FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION", "0")
    assert note not in plan_of(tiny_app, "").remarks


@pytest.mark.parametrize(
    ("arguments", "overrides"),
    [
        ("", {"num-clients": 2}),
        ("--clients 5", {"num-clients": 5}),
        ("--rounds 7", {"num-server-rounds": 7, "num-clients": 2}),
        ("--learning-rate 1", {"learning-rate": 1.0, "num-clients": 2}),
        ("--clients 4 --clients-per-round 3", {"clients-per-round": 3, "num-clients": 4}),
        ("--dataset two", {"dataset": "two", "num-clients": 2}),
        (
            "--partition dirichlet --dirichlet-alpha 0.1",
            {"partition": "dirichlet", "dirichlet-alpha": 0.1, "num-clients": 2},
        ),
        ("--run-config text='x' --run-config fail='y'", {"text": "x", "fail": "y", "num-clients": 2}),
    ],
)
def test_the_run_config_holds_the_given_options(
    arguments: str, overrides: dict[str, object], tiny_app: Path
) -> None:
    plan = plan_of(tiny_app, arguments)
    assert plan.overrides == overrides
    assert {key: type(value) for key, value in plan.overrides.items()} == {
        key: type(value) for key, value in overrides.items()
    }
    assert plan.run_config == {**plan.app.run_config, **overrides}
    assert plan.clients == overrides["num-clients"]


def test_the_number_of_clients_defaults_to_the_apps_config(tiny_app: Path) -> None:
    replace(tiny_app / "pyproject.toml", "num-clients = 2\n", "num-clients = 6\n")
    assert plan_of(tiny_app, "").clients == 6
    replace(tiny_app / "pyproject.toml", "num-clients = 6\n", "")
    assert plan_of(tiny_app, "").clients == 2
    plan = plan_of(tiny_app, "--clients 3")
    assert (plan.clients, plan.overrides) == (3, {})


def test_node_config_of_each_client(tiny_app: Path) -> None:
    plan = plan_of(tiny_app, "--clients 3 --node-config gpu='never'")
    assert [plan.node_config_of(client) for client in range(3)] == [
        {"partition-id": client, "num-partitions": 3, "gpu": "never"} for client in range(3)
    ]


@pytest.mark.parametrize(
    ("source", "takes_leases"),
    [
        ("from flower_gpu import gpu_mod", True),
        ("import flower_gpu as fg\nmods = [fg.gpu_mod(num_gpus=0.5)]", True),
        ("def client():\n    from flower_gpu import gpu_client as made", True),
        ("class Client(flower_gpu.GPUClient): ...", True),
        ("# gpu_mod\ntext = 'gpu_mod'\nfrom flower_gpu import progress, to_device", False),
    ],
)
def test_messages_get_leases_unless_the_app_takes_its_own(
    source: str, takes_leases: bool, tiny_app: Path
) -> None:
    """The launcher also searches the modules that the ClientApp's module imports."""
    (tiny_app / "tiny" / "task.py").write_text(source)
    client_app = tiny_app / "tiny" / "client_app.py"
    client_app.write_text(f"from tiny import task\n{client_app.read_text()}")
    assert plan_of(tiny_app, "").gives_leases == (not takes_leases)
    slow = plan_of(tiny_app, "--no-fast-start")
    assert not slow.gives_leases
    remarks = [line for line in slow.remarks if "the clients of tiny have no leases" in line]
    assert len(remarks) == (not takes_leases)


def test_data_dir_becomes_absolute(tiny_app: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace(tiny_app / "pyproject.toml", "[tool.flwr.app.config]", '[tool.flwr.app.config]\ndata-dir = ""')
    monkeypatch.chdir(tiny_app.parent)
    assert plan_of(tiny_app, "--data-dir images").overrides["data-dir"] == str(tiny_app.parent / "images")


def test_clients_share_the_cores(tiny_app: Path) -> None:
    assert plan_of(tiny_app, "--clients 8").clients_at_once == 8
    assert plan_of(tiny_app, "--clients 8 --clients-per-round 2").clients_at_once == 2


@pytest.mark.parametrize("line", ["launch --help", "supernode --help", "--version"])
def test_help_and_version_work_without_dependencies(line: str) -> None:
    """With `python -S` no installed package can be imported, as in a fresh clone."""
    result = run(
        [sys.executable, "-S", "-m", "flower_gpu.cli", *line.split()], cwd=Path(cli.__file__).parents[2]
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert "flower-gpu" in result.stdout


def test_help_has_the_keys_of_the_run_config(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run_main(["launch", "--help"], capsys)
    assert code == 0
    assert all(
        f"{flag(name)} " in out and f"[{option.run_config_key}]" in out for name, option in RUN_CONFIG.items()
    )


# Values of a run config, on command lines ------------------------------------------------------------------

KEYS = st.from_regex(r"[a-z][a-z0-9-]{0,8}", fullmatch=True)
# TOML has no lone surrogates, and its integers have 64 bits.
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
VALUES = st.one_of(st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False), TEXTS)


@given(st.dictionaries(KEYS, VALUES, min_size=1, max_size=4))
def test_flower_and_parse_pairs_read_what_format_pairs_writes(values: dict[str, object]) -> None:
    written = [format_pairs(values)]
    for read in (parse_config_args(written), parse_pairs("--run-config", written)):
        assert read == values
        assert [type(read[key]) for key in values] == [type(value) for value in values.values()]


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
def test_pairs_are_parsed_as_toml(texts: list[str], values: dict[str, object]) -> None:
    assert parse_pairs("--run-config", texts) == values


@pytest.mark.parametrize(
    "text",
    ["", "a", "a=", "=1", "a = 1", "a=x", "a='b", 'a="b"c', "a=[1]", "a={b=1}x", "a=1 b", "a=1979-05-27"],
)
def test_a_text_that_is_not_a_list_of_pairs_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--run-config"):
        parse_pairs("--run-config", [text])


def test_nested_tables_are_joined_as_in_flower() -> None:
    assert flatten({"a": {"b": {"c": 1}}, "d": "x"}) == {"a.b.c": 1, "d": "x"}
