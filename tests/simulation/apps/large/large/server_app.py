"""A server that leaves less memory for a large client than two small clients keep."""

import os
import tempfile
from pathlib import Path

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp

from flower_gpu import control_group

KEPT_MIB, LARGE_MIB, LEFT_MIB = 300, 850, 400
app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Let all clients keep memory, limit the control group, and let a client take more memory."""
    nodes = sorted(grid.get_node_ids())
    assert _taken(grid, nodes, KEPT_MIB, keeps=True) == [KEPT_MIB] * len(nodes)
    limit = control_group.memory_limit()
    assert limit is not None
    used_bytes = limit.total_bytes - limit.available_bytes
    Path(os.environ["LARGE_APP_LIMIT"]).write_text(str(used_bytes + (LEFT_MIB << 20)))
    print("taken:", _taken(grid, nodes[:1], LARGE_MIB, keeps=False))


def _taken(grid: Grid, nodes: list[int], mib: int, *, keeps: bool) -> list[object]:
    with tempfile.TemporaryDirectory() as folder:
        config = {"mib": mib, "keeps": keeps, "clients": len(nodes), "folder": folder}
        messages = [Message(RecordDict({"config": ConfigRecord(config)}), node, "train") for node in nodes]
        replies = list(grid.send_and_receive(messages))
    return [reply.error.reason if reply.has_error() else reply.content["taken"]["mib"] for reply in replies]
