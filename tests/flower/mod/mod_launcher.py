"""`flower-gpu launch` with a node config of its own for each client, as a host's operator writes them.

The launcher itself gives all nodes the same, apart from what it deals out.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from flower_gpu.cli import main as cli
from flower_gpu.launch.plan import Plan

each: list[dict[str, Any]] = json.loads(os.environ["MOD_TEST_NODE_CONFIGS"])
of_all = Plan.node_config_of


def node_config_of(plan: Plan, client: int) -> dict[str, Any]:
    return {**of_all(plan, client), **each[client]}


Plan.node_config_of = node_config_of  # type: ignore[method-assign]
sys.exit(cli.main(["launch", *sys.argv[1:]]))
