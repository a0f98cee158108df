"""Waiting for descriptors."""

from __future__ import annotations

import os

from flower_gpu.polling import readable


def test_a_deadline_that_has_passed_does_not_wait() -> None:
    reader, writer = os.pipe()
    try:
        assert readable([reader], -0.001) == set()
        os.write(writer, b"x")
        assert readable([reader], -1.0) == {reader}
    finally:
        os.close(reader)
        os.close(writer)
