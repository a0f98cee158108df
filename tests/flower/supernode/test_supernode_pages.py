"""The first commands of the pages for operators, supernodes.md and confine.md, serve a usual app."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from how_to_pages import first_command
from supernode_host import Federation, results_of

from flower_gpu.launch import ports
from flower_gpu.workers import confinement

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def test_nodes_that_are_started_as_the_pages_say_train(tmp_path: Path) -> None:
    """The app divides its data by partition-id, as most do. Data of an operator are not divided."""
    pages = ["supernodes.md", "confine.md"] if confinement.problem() is None else ["supernodes.md"]
    with Federation(tmp_path) as fed:
        for page in pages:
            own = {
                "superlink": f"127.0.0.1:{fed.port}",
                "port": str(ports.free_ports(1)[0]),
                "data": "pauses",
            }
            line = first_command(page, **own)
            if page == "confine.md":
                line += f" --port {own['port']} --node-config partition-id=1"
            fed.start(page, *shlex.split(line))
        run = fed.run(num_clients=len(pages))
        assert run.wait(200) == 0, run.output
        assert results_of(run, 1) == (f"{len(pages)} results and 0 failures", [])
