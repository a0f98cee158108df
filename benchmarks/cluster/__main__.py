"""A simulation on two hosts of a Ray cluster, and on one machine with the same cores, in alternation.

Parts: overhead (time of a round and of the command), wire (bytes between the hosts, CPU time, memory), costs
(of a message, a round, and a MB of the model), idle (of a host), many (the driver with many hosts).
README.md in the folder above explains the figures.
"""

from __future__ import annotations

import os
import sys

from benchmarks.cluster import costs, many, network, overhead
from benchmarks.shared.driver import Parser, run


def main() -> int:
    parser = Parser("cluster", __doc__, _PARTS, quick={"runs": 1}, full={"runs": 3})
    options = parser.parse()
    if sys.platform == "linux":
        # The one machine has the same cores as the two hosts.
        os.sched_setaffinity(0, network.cpus())
    return run(parser, options, _PARTS)


_PARTS = {
    "overhead": overhead.measure,
    "wire": overhead.measure_wire,
    "costs": costs.measure,
    "idle": costs.measure_idle,
    "many": many.measure,
}


if __name__ == "__main__":
    sys.exit(main())
