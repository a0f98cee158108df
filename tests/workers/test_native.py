"""What is asked of the kernel about this process's memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(60)


def test_memory_in_huge_pages_holds_what_it_held(run_script: Callable[..., Any]) -> None:
    done = run_script(
        """
        import numpy as np
        from flower_gpu.workers.native import (collapse, huge_page_regions)

        array = np.arange(8_000_000)  # 64 MB: a map of its own
        copy = array.tobytes()
        first, size = array.__array_interface__["data"][0], array.nbytes
        regions = huge_page_regions()
        inside = [address for address in regions if first <= address < first + size]
        assert all(address % (1 << 21) == 0 for address in regions)
        assert len(inside) >= size // (1 << 21) - 2, (len(inside), len(regions))
        for address in regions:
            collapse(address)
        assert array.tobytes() == copy
        array += 1
        assert int(array[-1]) == 8_000_000
        print("done")
        """
    )
    assert done.stdout == "done\n"
