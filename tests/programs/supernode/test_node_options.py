"""Options of `flower-gpu supernode`: refused values, and the settings that SuperNodes receive."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any

import pytest
from flwr.common.config import parse_config_args
from flwr.supernode.cli.flower_supernode import _parse_args_run_supernode

from flower_gpu import options
from flower_gpu.apps.app import parse_pairs
from flower_gpu.apps.folder import RunFolder
from flower_gpu.cli import main as cli
from flower_gpu.cli import supernode
from flower_gpu.errors import ConfigError
from flower_gpu.launch.supernodes import SuperNode
from flower_gpu.options import CallOptions

# Each command line with words of its error, which names the problem and a remedy. The tests of launch cover
# the options that several commands share.
REFUSED = [
    ("supernode --insecure", "unknown: --insecure --help flower-supernode go after two dashes, --"),
    ("supernode --gpu require -- --insecure", "policy require cannot be used Nothing was run"),
    ("supernode -- --insecure --node-config \"gpu='require'\"", "policy require cannot be used"),
    ("supernode --log-dir logs -- --insecure", "--log-dir needs --count"),
    ("supernode -- --isolation process", "--isolation process lease Remove it"),
    ("supernode --count 2 -- --insecure --port=9101", "--port leave it out free ones"),
    ("supernode -- --node-config num-cpus=10000", "num-cpus node config is too much at most"),
    ("supernode -- --node-config gpu=3", "gpu node config never, offer, force, require"),
    ("supernode --count 2 -- --node-config", "--node-config key=value"),
    ("supernode --count 2 -- --node-config data=here", "--node-config data=here quoted string '\"here\"'"),
    ("supernode --count 2 --gpu never -- --node-config \"gpu='force'\"", "--gpu --node-config gpu twice"),
    ("supernode --count 2 --log-dir= -- --insecure", "--log-dir must be a path"),
    (
        "supernode --count 2 -- --auth-supernode-private-key=key",
        "--auth-supernode-private-key is the key of one SuperNode: with it, give --count 1",
    ),
]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Unset all our variables, and return the working folder, into which commands write."""
    for name in [name for name in os.environ if name.startswith("FLOWER_GPU")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("FLOWER_GPU_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # hides the GPUs of the host
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refusal(line: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command in this process that must be refused. Returns its error message."""

    def not_refused(*_: Any) -> None:
        raise AssertionError("not refused")

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "execvpe", not_refused)  # otherwise this process could become a SuperNode
            code = cli.main(shlex.split(line))
    except SystemExit as end:
        code = end.code  # type: ignore[assignment]
    assert code == 2
    output = capsys.readouterr()
    assert output.out == ""
    return output.err


@pytest.mark.parametrize(("line", "words"), REFUSED)
def test_the_error_for_an_invalid_option_is_one_line_with_a_remedy(
    line: str, words: str, capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    text = refusal(line, capsys)
    assert text.startswith(f"flower-gpu {line.split()[0]}: ")
    assert text.count("\n") == 1 and text.endswith("\n")
    assert [word for word in words.split() if word not in text] == [], text
    assert not (folder / "runs").exists()


@pytest.mark.parametrize("option", ["--iso process", "--isolatio=process"])
def test_isolation_is_also_refused_if_it_is_abbreviated(option: str) -> None:
    with pytest.raises(ConfigError):
        supernode.check(["--insecure", *option.split()])


def test_the_error_for_an_invalid_variable_names_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FLOWER_GPU_POLL_S", "often")
    text = refusal("supernode -- --insecure", capsys)
    assert "FLOWER_GPU_POLL_S" in text and "often" in text and text.count("\n") == 1


@pytest.mark.parametrize("path", ["a file", "/proc/nothing"])
def test_the_error_for_an_impossible_state_folder_names_it(
    path: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "a file").touch()
    monkeypatch.setenv("FLOWER_GPU_STATE_DIR", path)
    text = refusal("supernode -- --insecure", capsys)
    assert path in text and "FLOWER_GPU_STATE_DIR" in text


def environment(line: str, base: dict[str, str], nodes: int = 1) -> dict[str, str]:
    arguments = cli.build_parser().parse_args(shlex.split(line))
    return supernode.environment(arguments, base, nodes)


def test_an_option_becomes_a_variable_and_overrides_the_existing_one() -> None:
    line = (
        "supernode --gpu require --gpu-ids 0,GPU-6f0b1f2e-5d0c-4a6b-9b1a-0f1d2c3b4a59 --gpu-memory 2GiB "
        "--lease-timeout-s 7 --on-oom cpu --timeout-s 60 -- --insecure"
    )
    base = {"FLOWER_GPU_POLICY": "never", "FLOWER_GPU_NUM_GPUS": "0.5", "FLOWER_GPU_TIMEOUT_S": "1"}
    base |= {"FLOWER_GPU_PLACEMENT": "pack", "HOME": "/home/me", "PATH": "/my/bin"}
    env = environment(line, base)
    assert "FLOWER_GPU_NUM_GPUS" not in env  # a share would contradict the size
    assert env["FLOWER_GPU_POLICY"] == "require"
    assert env["FLOWER_GPU_IDS"] == "0,GPU-6f0b1f2e-5d0c-4a6b-9b1a-0f1d2c3b4a59"
    assert env["FLOWER_GPU_MEMORY"] == "2GiB"
    assert env["FLOWER_GPU_LEASE_TIMEOUT_S"] == "7.0"
    assert env["FLOWER_GPU_ON_OOM"] == "cpu"
    assert env["FLOWER_GPU_TIMEOUT_S"] == "60.0"
    assert (env["FLOWER_GPU_PLACEMENT"], env["HOME"]) == ("pack", "/home/me")
    assert env["FLOWER_GPU_SUPERNODE"] == "lease"
    assert env["PATH"].endswith(":/my/bin")
    assert base["FLOWER_GPU_POLICY"] == "never"


def test_without_options_the_variables_are_unchanged() -> None:
    base = {
        "FLOWER_GPU_POLICY": "never",
        "FLOWER_GPU_NUM_GPUS": "0.5",
        "FLOWER_GPU_TIMEOUT_S": "9",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "3",
        "PYTORCH_NVML_BASED_CUDA_CHECK": "0",
        "PATH": "/my/bin",
    }
    env = environment("supernode -- --insecure", base)
    assert {name: env[name] for name in base if name != "PATH"} == {
        k: v for k, v in base.items() if k != "PATH"
    }
    # The rule of this command replaces one that happens to be in the environment.
    assert (
        environment("supernode -- -V", {"FLOWER_GPU_SUPERNODE": "start"})["FLOWER_GPU_SUPERNODE"] == "lease"
    )


@pytest.mark.parametrize("equals", [True, False])
def test_each_supernode_gets_its_partition_and_gpu_unless_the_user_sets_them(
    equals: bool, tmp_path: Path
) -> None:
    pairs = ["site='a b' num-partitions=7", "lr=0.5"]
    line = ["--insecure", "--superlink", "a:1", *(["--max-retries=3"] if equals else [])]
    line_without_node_config = list(line)
    for text in pairs:
        line += [f"--node-config={text}"] if equals else ["--node-config", text]
    rest, texts = supernode.without_option(line, "--node-config")
    assert (rest, texts) == (line_without_node_config, pairs)
    calls: CallOptions = {"gpu": "offer", "gpu_ids": "3,5"}
    env = options.environment(calls, {"PATH": "/bin"})
    for number in range(3):
        pairs_of_user = parse_pairs("--node-config", texts)
        node = SuperNode(number, 3, rest, pairs_of_user, calls, env, RunFolder(tmp_path))
        # Flower's parser must read the intended values.
        parsed = _parse_args_run_supernode().parse_args(node.options)
        gpu = (3, 5, 3)[number]
        assert parse_config_args([parsed.node_config]) == {
            **{"partition-id": number, "num-partitions": 7, "site": "a b", "lr": 0.5},
            **{"gpu": "offer", "gpu-ids": gpu},
        }
        added = {"FLOWER_GPU_IDS": str(gpu), "FLOWER_GPU_POLICY": "offer", "FLOWER_GPU_CLIENT": str(number)}
        assert node.env == {**node.env, **added}


@pytest.mark.parametrize("option", ["--node-conf", "--nod=x"])
def test_an_abbreviated_node_config_option_is_recognised(option: str) -> None:
    name, sign, _ = option.partition("=")
    line = [f"{name}=data=1"] if sign else [name, "data=1"]
    assert supernode.without_option(line, "--node-config") == ([], ["data=1"])


@pytest.mark.parametrize(
    ("line", "base", "concurrency"),
    [
        ("supernode --count 6 -- --insecure", {}, "6"),
        ("supernode --count 6 -- --insecure", {"FLOWER_GPU_CONCURRENCY": "3"}, "3"),
        ("supernode --count 1 -- --insecure", {}, None),
    ],
)
def test_supernodes_share_the_cores(line: str, base: dict[str, str], concurrency: str | None) -> None:
    count = int(line.split()[2])
    env = environment(line, {"PATH": os.environ["PATH"], **base}, count)
    assert env.get("FLOWER_GPU_CONCURRENCY") == concurrency
