"""The GPUs that CUDA_VISIBLE_DEVICES leaves visible, compared with examples and with PyTorch."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nvml_stub import Host
from run_programs import run

from flower_gpu.gpu.gpus import GPU, Inventory

GIB = 2**30


def gpu(index: int, uuid: str, mig_parent: str | None = None, problem: str | None = None) -> GPU:
    return GPU(index, uuid, "Model", GIB, 0, GIB, 0, 0, (), mig_parent, problem)


def inventory(*gpus: GPU) -> Inventory:
    return Inventory(gpus, "550.54.14", None)


THREE = inventory(gpu(0, "GPU-aa11"), gpu(1, "GPU-aa22"), gpu(2, "GPU-bb33"))
WITH_MIG = inventory(
    gpu(0, "GPU-aa11"),
    gpu(1, "GPU-bb22", problem="MIG mode is on"),
    gpu(1, "MIG-cc33", mig_parent="GPU-bb22"),
    gpu(1, "MIG-cc44", mig_parent="GPU-bb22"),
    gpu(2, "GPU-dd55"),
)


def uuids(gpus: Sequence[GPU]) -> list[str]:
    return [gpu.uuid.partition("-")[2] for gpu in gpus]


# The visible GPUs, and values of the variable that lead to them.
OF_THREE: dict[str, list[str | None]] = {
    "aa11 aa22 bb33": [None, "0,1,2"],
    "aa22 bb33": [" 1 , 2", "1gpu2,2ampere"],
    "bb33 aa11": ["2,0", "GPU-bb33,GPU-aa11"],
    "aa11": ["0,-1,1", "0,7,1", "0,,1", "0,x,1", "GPU-aa1,GPU-zz,GPU-b", "GPU-aa11,1", "0,GPU-bb33"],
    "bb33": ["GPU-b"],
    "": [
        *("", " ", "-1", "NoDevFiles", "9" * 5000, "gpu-aa11", "aa11"),  # Slurm sets "NoDevFiles" for none
        *("GPU-aa", "GPU-b,GPU-bb33", "GPU-b,GPU-b", "0,1,0"),  # an ambiguous prefix, and duplicates
    ],
}
OF_MIG: dict[str, list[str | None]] = {
    "aa11 cc33 cc44 dd55": [None],
    "cc33 cc44": ["1", "GPU-b"],
    "dd55 cc33 cc44": ["2,1"],
    "cc44": ["MIG-cc44", "MIG-cc44,GPU-aa11", "MIG-cc44,0"],
    "cc44 cc33": ["MIG-cc44,MIG-cc33"],
    "": ["MIG-cc4", "MIG-cc44,MIG-cc44"],  # UUIDs of MIG devices may not be shortened
}


@pytest.mark.parametrize(
    ("gpus", "value", "expected"),
    [
        (gpus, value, expected)
        for gpus, examples in ((THREE, OF_THREE), (WITH_MIG, OF_MIG))
        for expected, values in examples.items()
        for value in values
    ],
    ids=lambda argument: str(argument)[:20],
)
def test_the_variable_leaves_the_expected_gpus(gpus: Inventory, value: str | None, expected: str) -> None:
    assert " ".join(uuids(gpus.visible(value))) == expected


def test_a_broken_gpu_keeps_its_number() -> None:
    gpus = inventory(gpu(0, "", problem="it is lost"), gpu(1, "GPU-aa22"))
    assert [gpu.index for gpu in gpus.visible("1")] == [1]
    assert [gpu.index for gpu in gpus.visible("0,1")] == [0, 1]
    assert uuids(gpus.visible("GPU-")) == ["aa22"]


def test_a_complete_uuid_is_not_taken_for_a_prefix() -> None:
    gpus = inventory(gpu(0, "GPU-aa"), gpu(1, "GPU-aabb"))
    assert gpus.visible("GPU-aa") == gpus.gpus[:1]


@given(st.text("0123456789,-+ GPUMIabcd/x\x00\n٣", max_size=40))
def test_any_text_leaves_a_subset_of_the_gpus_without_duplicates(value: str) -> None:
    visible = WITH_MIG.visible(value)
    assert len(set(visible)) == len(visible)
    assert set(visible) <= set(WITH_MIG.visible(None))


COUNTED = """
import json, os, sys
import torch
assert torch.cuda.is_available() and torch.cuda.device_count() == 2
counts = []
for value in json.loads(sys.argv[1]):
    os.environ["CUDA_VISIBLE_DEVICES"] = value
    counts.append(torch.cuda.device_count())
print(json.dumps(counts))
"""


def test_pytorch_counts_the_same_number_of_gpus(host: Host) -> None:
    first, second = host.uuids
    values = ["", "0", "1", "0,1", "1,0", "0,0", "0,2", "2", "2,0", "-1", "0,-1", "0,x", "1a,0b", " 1"]
    values += ["x", "5,5,0", "GPU-", "GPU-zz", first[:7]]
    values += [first, f"{first},{second}", f"{first},{first[:8]}", f"{second},0"]
    env = {**os.environ, **host.env, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    env.pop("CUDA_VISIBLE_DEVICES", None)
    command = [sys.executable, "-c", COUNTED, json.dumps(values)]
    completed = run(command, env=env, check=True)
    gpus = inventory(gpu(0, first), gpu(1, second))
    counts = {value: len(gpus.visible(value)) for value in values}
    assert counts == dict(zip(values, json.loads(completed.stdout), strict=True))


def test_a_gpu_with_unknown_memory_is_not_usable() -> None:
    healthy = gpu(0, "GPU-aa11")
    assert healthy.is_usable
    for missing in ("total_bytes", "used_bytes", "free_bytes"):
        fields = {**vars(healthy), missing: None}
        assert not GPU(**fields).is_usable
    assert GPU(**{**vars(healthy), "reserved_bytes": None, "processes": None}).is_usable
    assert not GPU(**{**vars(healthy), "uuid": ""}).is_usable
    assert not GPU(**{**vars(healthy), "problem": "it is lost"}).is_usable
