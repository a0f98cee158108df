"""Array records for tests, and a child process that sends them back."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from flwr.common import Array, ArrayRecord

from flower_gpu.flower import arrays  # noqa: F401 - registers how records are pickled
from flower_gpu.workers import transport


def record(size: int = 300_000, value: float = 0.0) -> ArrayRecord:
    return ArrayRecord(
        {
            "large": Array(np.full(size, value, np.float32)),
            "small": Array(np.full((2, 3), value)),
            "fortran": Array(np.asfortranarray(np.arange(600_000.0).reshape(600, 1000))),
        }
    )


def arrived_from(value: Any) -> Any:
    """Send a value to a forked process and return the copy that it sends back."""
    request, reply = transport.create("flower-gpu-request"), transport.create("flower-gpu-reply")
    try:
        shared = transport.write_request(value, request)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                transport.write_reply(transport.read_request(request, shared), reply)
                code = 0
            finally:
                os._exit(code)
        if shared >= 0:
            os.close(shared)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        return transport.read_reply(reply, request)
    finally:
        os.close(request)
        os.close(reply)
