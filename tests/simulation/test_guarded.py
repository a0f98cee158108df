"""`flower-gpu simulate` with the GPU guard: the devices that clients can open, and hosts without a guard."""

from __future__ import annotations

import ctypes
import os
import struct
import subprocess
from pathlib import Path
from typing import Any

import pytest
from simulations import TIMEOUT_S, command
from stub_host import StubHost

from flower_gpu.calls.grants import guard

pytestmark = pytest.mark.timeout(240)
needs_guard = pytest.mark.skipif(guard.problem() is not None, reason=str(guard.problem()))

_CREATE_RULESET = 444
_NO_NEW_PRIVS, _SET_SECCOMP, _FILTER = 38, 22, 2  # linux/prctl.h, linux/seccomp.h
_LOAD, _IS, _RETURN = 0x20, 0x15, 0x06  # linux/bpf_common.h
_ALLOW, _EPERM = 0x7FFF0000, 0x00050001


def simulated(folder: Path, device: str, *options: str, **env: str) -> list[dict[str, Any]]:
    host = StubHost(folder, gpus=2)
    guarded = {"FLOWER_GPU_GUARDED": device, "LEASED_APP_DEVICE": device, **env}
    with host.simulating(4, *options, app="leased", **guarded) as running:
        assert running.process.wait(TIMEOUT_S) == 0, running.output.read_text()
    notes = host.notes()
    assert {note["partition"] for note in notes} == {0, 1, 2, 3}, running.output.read_text()
    return notes


@pytest.fixture
def device(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file that the guard treats as a device of the host."""
    # The folder lies outside tmp_path, because new files above a device cannot be opened.
    folder = tmp_path_factory.mktemp("devices")
    (folder / "nvidia7").write_text("")
    return str(folder / "nvidia7")


@needs_guard
@pytest.mark.parametrize("options", [("--gpu", "never"), ("--num-gpus", "0.5", "--calls-per-worker", "2")])
def test_a_client_opens_only_the_devices_of_its_lease(
    tmp_path: Path, device: str, options: tuple[str, ...]
) -> None:
    notes = simulated(tmp_path, device, *options)
    assert all(note["opened"] == {"here": False, "program": False} for note in notes)


def test_the_guard_can_be_disabled(tmp_path: Path, device: str) -> None:
    notes = simulated(tmp_path, device, "--num-gpus", "0.5", "--gpu-guard", "off")
    assert all(note["opened"] == {"here": True, "program": True} for note in notes)


def test_a_required_guard_is_an_error_if_the_kernel_refuses_it(tmp_path: Path) -> None:
    done = subprocess.run(
        command("leased", 2, "--log-dir", str(tmp_path / "runs"), "--gpu-guard", "require"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
        # Under this filter the test would start another fork server.
        env={
            **os.environ,
            "LEASED_APP_NOTES": str(tmp_path / "notes"),
            "FLOWER_GPU_START_METHOD": "spawn",
        },
        # This process has no threads.
        preexec_fn=_forbid_landlock,
    )
    assert done.returncode == 2, done.stdout
    assert "--gpu-guard require" in done.stdout
    assert "the container forbids Landlock (seccomp)" in done.stdout
    assert not (tmp_path / "notes").exists()


def _forbid_landlock() -> None:
    """Make the kernel refuse Landlock to this process, as a container's seccomp profile does."""
    library = ctypes.CDLL(None, use_errno=True)
    filters = [
        (_LOAD, 0, 0, 0),
        (_IS, 0, 1, _CREATE_RULESET),
        (_RETURN, 0, 0, _EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]
    program = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *each) for each in filters))
    header = struct.pack("@HP", len(filters), ctypes.addressof(program))
    assert library.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    assert library.prctl(_SET_SECCOMP, _FILTER, ctypes.c_char_p(header), 0, 0) == 0
