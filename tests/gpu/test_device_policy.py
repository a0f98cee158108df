"""The node's policy against the server's request: the complete table, and the sources of the policy."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from flower_gpu.calls.settings import call_settings
from flower_gpu.errors import ConfigError, GPUUnavailableError
from flower_gpu.gpu.gpus import GPU
from flower_gpu.gpu.policy import Decision, DevicePolicy, decide
from flower_gpu.options import CALL, POLICIES

PAGE = Path(__file__).parents[2] / "docs/explanation/device-policy.md"
GIB = 1 << 30


def gpu(index: int, uuid: str | None = None, **fields: Any) -> GPU:
    """Return a healthy GPU of 16 GiB. ``fields`` replaces some of its attributes."""
    figures = {
        "total_bytes": 16 * GIB,
        "used_bytes": 0,
        "free_bytes": 16 * GIB,
        "reserved_bytes": 0,
        "utilization_percent": 0,
        "processes": (),
    }
    return GPU(index=index, uuid=uuid or f"GPU-{index}000", name="Stub 16GB", **{**figures, **fields})


def gpu_numbers(value: int | str | None) -> tuple[int | str, ...] | None:
    return CALL["gpu_ids"].resolve(value)


# The two GPUs have the numbers 0 and 1.
GPUS = (gpu(0), gpu(1))

#: The possible states of a node: its GPUs and the value of gpu-ids.
SITUATIONS: dict[str, tuple[tuple[GPU, ...], str | None]] = {
    "no GPU": ((), None),
    "no GPU, gpu-ids set": ((), "1"),
    "GPUs, no gpu-ids": (GPUS, None),
    "gpu-ids is there": (GPUS, "1"),
    "gpu-ids is missing": (GPUS, "7"),
    "part of gpu-ids is missing": (GPUS, "1,7"),
}

#: Pattern of each warning, by its letter in the table.
WARNINGS = {
    "a": r"policy is (force|require): a GPU is used although the server does not request one",
    "b": r"runs on the CPU although the server requests a GPU: .+",
    "c": r"runs on the CPU although gpu-ids is 1: this node has no GPU",
    "d": r"there is no GPU 7; used instead: .+",
    "e": r"policy is force, but no GPU can be used, so this call runs on the CPU: this node has no GPU",
}

USE_GPU = {"missing": None, "true": True, "false": False}
UUIDS = {"CPU": (), "all": ("GPU-0000", "GPU-1000"), "named": ("GPU-1000",)}


@dataclass(frozen=True)
class Case:
    """One cell of the table."""

    policy: str
    use_gpu: str
    situation: str
    # "CPU" (all GPUs are hidden), "all", "named" (the existing GPUs of gpu-ids) or "error"
    outcome: str
    letters: str  # letters of the warnings

    def __str__(self) -> str:
        return f"{self.policy} use-gpu {self.use_gpu}: {self.situation}"


def documented() -> list[Case]:
    """Read the table of the documentation: policy, use-gpu and one cell for each situation."""
    cases = []
    for line in re.findall(r"^\| `(?:never|offer|force|require)` \|.+", PAGE.read_text(), re.MULTILINE):
        policy, use_gpu, *cells = (cell.strip().strip("`") for cell in line.strip("| ").split("|"))
        for situation, cell in zip(SITUATIONS, cells, strict=True):
            match = re.fullmatch(r"(\w+)(?: ?\(([a-e](?:, ?[a-e])*)\))?", cell)
            assert match, f"{cell!r} in the row {policy}, {use_gpu}"
            cases.append(Case(policy, use_gpu, situation, match[1], re.sub(r"\W", "", match[2] or "")))
    return cases


CASES = documented()


def outcome_of(case: Case) -> tuple[str, str]:
    """Call decide() and return its decision in the words of the table."""
    gpus, numbers = SITUATIONS[case.situation]
    policy = DevicePolicy(case.policy, gpu_numbers(numbers))
    try:
        decision = decide(policy, USE_GPU[case.use_gpu], gpus)
    except GPUUnavailableError:
        return "error", ""
    outcome = next(word for word, uuids in UUIDS.items() if uuids == decision.uuids)
    letters = ""
    for warning in decision.warnings:
        (letter,) = (letter for letter, pattern in WARNINGS.items() if re.search(pattern, warning))
        letters += letter
    return outcome, letters


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_decision_matches_the_table(case: Case) -> None:
    assert outcome_of(case) == (case.outcome, case.letters)


def test_the_table_is_complete() -> None:
    combinations = {(case.policy, case.use_gpu, case.situation) for case in CASES}
    assert len(combinations) == len(CASES) == len(POLICIES) * len(USE_GPU) * len(SITUATIONS)


def test_the_documented_columns_and_letters_match_the_test() -> None:
    text = PAGE.read_text()
    (head,) = re.findall(r"^\| policy \| `use-gpu` \| (.+) \|$", text, re.MULTILINE)
    assert [column.strip().replace("`", "") for column in head.split("|")] == list(SITUATIONS)
    explained = re.findall(r"^- \(([a-z])\) ", text, re.MULTILINE)
    assert explained == list(WARNINGS)


@pytest.mark.parametrize("policy", POLICIES)
def test_only_a_forced_but_missing_gpu_is_serious(policy: str) -> None:
    serious = {case for case in CASES if "e" in case.letters}
    for case in (case for case in CASES if case.policy == policy and case.outcome != "error"):
        gpus, numbers = SITUATIONS[case.situation]
        decision = decide(DevicePolicy(policy, gpu_numbers(numbers)), USE_GPU[case.use_gpu], gpus)
        assert decision.is_serious == (case in serious)
        assert decision.on_gpu == (case.outcome != "CPU")


# The reasons in warnings and errors.

BROKEN = gpu(1, problem="GPU is lost; restart the host")
UNKNOWN = gpu(1, used_bytes=None)
CARD = gpu(1, "GPU-1000", problem="MIG mode is on")
MIG = (gpu(1, "MIG-aa11", mig_parent="GPU-1000"), gpu(1, "MIG-bb22", mig_parent="GPU-1000"))


def test_the_reason_for_missing_gpus_is_passed_on() -> None:
    decision = decide(DevicePolicy("force"), None, (), "the NVIDIA driver is not loaded")
    assert decision.warnings[0].endswith("the NVIDIA driver is not loaded")
    with pytest.raises(GPUUnavailableError, match="the NVIDIA driver is not loaded"):
        decide(DevicePolicy("require"), None, (), "the NVIDIA driver is not loaded")


@pytest.mark.parametrize(
    ("broken", "reason"), [(BROKEN, "GPU is lost; restart the host"), (UNKNOWN, "memory is not known")]
)
def test_a_gpu_with_a_problem_is_never_used_and_the_reason_is_reported(broken: GPU, reason: str) -> None:
    gpus = (gpu(0), broken)
    assert decide(DevicePolicy("force"), True, gpus) == Decision(("GPU-0000",))
    for number in ("1", "GPU-1000"):
        named = DevicePolicy("offer", gpu_numbers(number))
        decision = decide(named, True, gpus)
        assert decision.uuids == ("GPU-0000",)
        assert len(decision.warnings) == 1 and reason in decision.warnings[0]
        with pytest.raises(GPUUnavailableError, match=reason):
            decide(DevicePolicy("require", named.gpu_ids), True, gpus)
    only = decide(DevicePolicy("force"), True, (broken,))
    assert not only.on_gpu and reason in only.warnings[0]


def test_the_message_says_that_a_gpu_is_hidden() -> None:
    decision = decide(DevicePolicy("offer", (1,)), True, (gpu(0),), hidden=(gpu(1),))
    assert decision.uuids == ("GPU-0000",)
    assert "GPU 1 is hidden by CUDA_VISIBLE_DEVICES" in decision.warnings[0]
    with pytest.raises(GPUUnavailableError, match="GPU 1 is hidden by CUDA_VISIBLE_DEVICES"):
        decide(DevicePolicy("require", (0, 1)), True, (gpu(0),), hidden=(gpu(1),))
    (warning,) = decide(DevicePolicy("offer"), True, (), hidden=GPUS).warnings
    assert "CUDA_VISIBLE_DEVICES hides every GPU" in warning


def test_all_required_gpus_must_exist() -> None:
    with pytest.raises(GPUUnavailableError) as caught:
        decide(DevicePolicy("require", (0, 7, "GPU-ffff")), True, GPUS)
    message = str(caught.value)
    for part in ("there is no GPU 7", "there is no GPU-ffff", "usable here: GPU 0", "flower-gpu gpus"):
        assert part in message


def test_the_warning_names_the_gpus_that_are_used_instead() -> None:
    (warning,) = decide(DevicePolicy("offer", (7,)), True, GPUS).warnings
    assert warning == (
        "there is no GPU 7; used instead: all that there are, GPU 0 (Stub 16GB), GPU 1 (Stub 16GB)"
    )
    (warning,) = decide(DevicePolicy("offer", (1, 7)), True, GPUS).warnings
    assert warning == "there is no GPU 7; used instead: the others that were named, GPU 1 (Stub 16GB)"


# The GPUs that a name stands for.

MANY = (gpu(0, "GPU-ab12-0001"), gpu(1, "GPU-ab34-0002"), gpu(2, "GPU-ab34-0003"), gpu(3, "GPU-ab3"))


@pytest.mark.parametrize(
    ("gpus", "named", "uuids"),
    [
        (MANY, "0", "GPU-ab12-0001"),
        (MANY, "GPU-ab12-0001", "GPU-ab12-0001"),
        (MANY, "GPU-ab12", "GPU-ab12-0001"),
        (MANY, "gpu-AB12", "GPU-ab12-0001"),
        (MANY, "GPU-ab3", "GPU-ab3"),  # a complete UUID that is also a prefix of others
        (MANY, "2,0", "GPU-ab34-0003 GPU-ab12-0001"),  # the order of the value counts
        (MANY, "0, GPU-ab12, GPU-ab12-0001, 0", "GPU-ab12-0001"),  # duplicates are dropped
        # A card in MIG mode means its MIG devices.
        *(
            (gpus, named, uuids)
            for gpus in ((gpu(0), CARD, *MIG), (gpu(0), *MIG))
            for named, uuids in (
                ("1", "MIG-aa11 MIG-bb22"),
                ("GPU-1000", "MIG-aa11 MIG-bb22"),
                ("GPU-10", "MIG-aa11 MIG-bb22"),
                ("MIG-bb22", "MIG-bb22"),
                ("MIG-bb", "MIG-bb22"),
                (None, "GPU-0000 MIG-aa11 MIG-bb22"),
            )
        ),
        ((gpu(1), gpu(0)), None, "GPU-1000 GPU-0000"),  # the order of the visible GPUs counts
    ],
)
def test_gpus_are_named_by_number_uuid_or_prefix(
    gpus: tuple[GPU, ...], named: str | None, uuids: str
) -> None:
    decision = decide(DevicePolicy("require", gpu_numbers(named)), True, gpus)
    assert decision == Decision(tuple(uuids.split()))


def test_an_ambiguous_prefix_names_no_gpu() -> None:
    (warning,) = decide(DevicePolicy("offer", ("GPU-ab34",)), None, MANY).warnings
    assert "GPU-ab34 fits 2 GPUs (GPU-ab34-0002, GPU-ab34-0003)" in warning
    with pytest.raises(GPUUnavailableError, match="fits 2 GPUs"):
        decide(DevicePolicy("require", ("GPU-ab34",)), None, MANY)


# The sources of the policy.


@pytest.mark.parametrize(
    ("value", "numbers"),
    [
        (None, None),
        (0, (0,)),
        (-1, (-1,)),
        ("0", (0,)),
        ("4,5", (4, 5)),
        (" 0 , GPU-abc ", (0, "GPU-abc")),
        ("GPU-abc,MIG-0-1,MIG-GPU-abc/1/0", ("GPU-abc", "MIG-0-1", "MIG-GPU-abc/1/0")),
        ("1,1,01", (1,)),
        ("-1", (-1,)),
    ],
)
def test_gpu_numbers_are_parsed(value: int | str | None, numbers: tuple[int | str, ...] | None) -> None:
    assert gpu_numbers(value) == numbers


@pytest.mark.parametrize("value", ["", " ", "1,", ",1", "1,,2"])
def test_empty_entries_are_refused(value: str) -> None:
    with pytest.raises(ConfigError, match="has an empty entry"):
        gpu_numbers(value)


INVALID_NAMES = ["cuda:0", "all", "1 2", "1.0", "GPU-", "0x1", "[4,5]", "GPU 1", "1" * 5000]


@pytest.mark.parametrize("value", INVALID_NAMES)
def test_invalid_names_of_gpus_are_refused(value: str) -> None:
    with pytest.raises(ConfigError, match="which is neither a GPU number nor a UUID"):
        gpu_numbers(value)


WORDS = (
    " is not one of never (no GPU), offer (a GPU if the run requests one), force (a GPU, else the CPU, "
    "whatever the run requests), require (a GPU, else an error, whatever the run requests)"
)


@pytest.mark.parametrize(
    ("code", "node_config", "environ", "kind", "text"),
    [
        ({}, {"gpu": "always"}, {}, ConfigError, f"--node-config gpu='always'{WORDS}"),
        ({}, {}, {"FLOWER_GPU_POLICY": "always"}, ConfigError, f"FLOWER_GPU_POLICY='always'{WORDS}"),
        ({"gpu": "Force"}, {}, {}, ConfigError, f"gpu='Force'{WORDS}"),
        ({"gpu": ""}, {}, {}, ConfigError, f"gpu=''{WORDS}"),
        ({"gpu_ids": [4, 5]}, {}, {}, TypeError, "gpu_ids must be"),
        ({}, {"gpu": True}, {}, ConfigError, "--node-config gpu must be one of the words"),
        ({}, {"gpu-ids": 1.5}, {}, ConfigError, "--node-config gpu-ids must be"),
    ],
)
def test_the_error_for_an_invalid_value_names_its_source_and_the_choices(
    code: dict[str, Any],
    node_config: dict[str, Any],
    environ: dict[str, str],
    kind: type[Exception],
    text: str,
) -> None:
    with pytest.raises(kind) as caught:
        _ = call_settings(code, base=environ, node_config=node_config).gpu.policy
    assert str(caught.value).startswith(text)


def requested(config: dict[str, Any], run_config: dict[str, Any]) -> bool | None:
    return call_settings({}, base={}, run_config=run_config).gpu.requested(config)


@pytest.mark.parametrize(
    ("fit_config", "run_config", "expected"),
    [
        ({}, {}, None),
        ({"lr": 0.1}, {"use-gpu": True}, True),
        ({}, {"use-gpu": False}, False),
        ({"use-gpu": False}, {"use-gpu": True}, False),
        ({"use-gpu": True}, {"use-gpu": "yes"}, True),  # the invalid value is not read
    ],
)
def test_the_request_of_the_call_overrides_that_of_the_run(
    fit_config: dict[str, Any], run_config: dict[str, Any], expected: bool | None
) -> None:
    assert requested(fit_config, run_config) is expected


@pytest.mark.parametrize("value", ["yes", "true", "", 1, 0, 1.0, [True]])
def test_the_request_must_be_a_bool(value: Any) -> None:
    for configs in (({"use-gpu": value}, {}), ({}, {"use-gpu": value})):
        with pytest.raises(ConfigError, match="use-gpu in the config of the call or the run must be true or"):
            requested(*configs)


def test_a_message_cannot_change_the_policy() -> None:
    """The server sends keys of a node config, which must be ignored."""
    sent = {"gpu": "force", "gpu-ids": 0, "use-gpu": True}
    settings = call_settings({}, base={}, node_config={"gpu": "never"}, run_config=sent).gpu
    assert decide(settings.policy, settings.requested(sent), GPUS).uuids == ()
