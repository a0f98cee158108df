"""SecAgg+ around ``gpu_mod``, message by message: only the stage that trains has a worker and a lease."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import mod_functions as functions
import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.common import FitIns, ndarrays_to_parameters
from flwr.common.secure_aggregation.ndarrays_arithmetic import parameters_mod, parameters_subtraction
from flwr.common.secure_aggregation.quantization import dequantize
from flwr.common.secure_aggregation.secaggplus_constants import (
    RECORD_KEY_CONFIGS,
    RECORD_KEY_STATE,
    Key,
    Stage,
)
from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen
from flwr.compat.common.recorddict_compat import fitins_to_recorddict
from launched import events_of

from flower_gpu import gpu_mod

pytestmark = pytest.mark.timeout(120)

NODES = (101, 102)
CLIPPING, TARGET, MOD, MOST = 4.0, 1 << 16, 1 << 32, 10.0


class Client:
    """One node with its state, as its SuperNode keeps it."""

    def __init__(self, node: int) -> None:
        self.node = node
        self.context = Context(12, node, {"partition-id": node}, RecordDict(), {})
        mods = [secaggplus_mod, gpu_mod(start_method="forkserver")]
        self.app = ClientApp(functions.client_fn, mods=mods)

    def __call__(self, stage: str, content: RecordDict | None = None, **configs: Any) -> ConfigRecord:
        content = content or RecordDict()
        content[RECORD_KEY_CONFIGS] = ConfigRecord({Key.STAGE: stage, **configs})
        reply = self.app(Message(content, dst_node_id=self.node, message_type="train"), self.context)
        found: ConfigRecord = reply.content.config_records[RECORD_KEY_CONFIGS]
        self.left = reply.content
        return found


def test_only_the_stage_that_trains_has_a_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWER_GPU_RUN_DIR", str(tmp_path))
    clients = {node: Client(node) for node in NODES}
    sizes = {Key.SAMPLE_NUMBER: 2, Key.SHARE_NUMBER: 2, Key.THRESHOLD: 2}
    ranges = {
        Key.CLIPPING_RANGE: CLIPPING,
        Key.TARGET_RANGE: TARGET,
        Key.MOD_RANGE: MOD,
        Key.MAX_WEIGHT: MOST,
    }
    keys = {node: client(Stage.SETUP, **sizes, **ranges) for node, client in clients.items()}
    public = {str(node): [key[Key.PUBLIC_KEY_1], key[Key.PUBLIC_KEY_2]] for node, key in keys.items()}
    shares = {node: client(Stage.SHARE_KEYS, **public) for node, client in clients.items()}
    assert events_of(tmp_path, "worker_started") == []

    vectors = {}
    for node, client in clients.items():
        (other,) = set(NODES) - {node}
        content = fitins_to_recorddict(FitIns(ndarrays_to_parameters([np.zeros(3)]), {}), True)
        sent = {Key.CIPHERTEXT_LIST: shares[other][Key.CIPHERTEXT_LIST], Key.SOURCE_LIST: [other]}
        vectors[node] = client(Stage.COLLECT_MASKED_VECTORS, content, **sent)[Key.MASKED_PARAMETERS]
        assert all(not record for record in client.left.array_records.values()), "no plain weights leave it"
        metrics = client.left.config_records["fitres.metrics"]
        assert metrics["name"] == f"partition {node}" and metrics["pid"] != os.getpid()
    assert [one["client"] for one in events_of(tmp_path, "worker_started")] == ["101", "102"]

    lists = {Key.ACTIVE_NODE_ID_LIST: list(NODES), Key.DEAD_NODE_ID_LIST: []}
    for client in clients.values():
        assert client(Stage.UNMASK, **lists)[Key.NODE_ID_LIST] == list(NODES)
    assert len(events_of(tmp_path, "worker_started")) == 2
    assert average(clients, vectors) == pytest.approx([1, 1, 1], abs=0.01)


def average(clients: dict[int, Client], vectors: dict[int, Any]) -> Any:
    """Take the masks off, as the server would: those of the pairs are gone in the sum."""
    total: list[Any] | None = None
    for node, client in clients.items():
        vector = [np.load(io.BytesIO(data), allow_pickle=False) for data in vectors[node]]
        seed: Any = client.context.state.config_records[RECORD_KEY_STATE]["rd_seed"]
        private = pseudo_rand_gen(seed, MOD, [array.shape for array in vector])
        vector = parameters_subtraction(vector, private)
        total = vector if total is None else [one + two for one, two in zip(total, vector, strict=True)]
    assert total is not None
    weight, sum_ = parameters_mod(total, MOD)
    (found,) = dequantize([sum_], CLIPPING, TARGET)
    # Each of both has added CLIPPING once, which is taken off once for the sum.
    found -= (len(clients) - 1) * CLIPPING
    return found / (float(np.squeeze(weight)) / TARGET)


def test_messages_that_are_not_for_training_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWER_GPU_RUN_DIR", str(tmp_path))
    app = ClientApp(mods=[secaggplus_mod, gpu_mod(start_method="fork")])

    @app.query()
    def query(message: Message, context: Context) -> Message:
        return Message(RecordDict({"it": MetricRecord({"pid": os.getpid()})}), reply_to=message)

    message = Message(RecordDict(), dst_node_id=101, message_type="query")
    reply = app(message, Context(12, 101, {}, RecordDict(), {}))
    assert reply.content["it"]["pid"] != os.getpid()
    assert len(events_of(tmp_path, "worker_started")) == 1
