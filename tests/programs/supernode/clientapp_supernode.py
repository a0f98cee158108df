"""The Runtime API and the state of a SuperNode for ``flwr-clientapp``, without a SuperLink."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import uvicorn
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.supercore.constant import TaskType
from flwr.supercore.fab import Fab
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode.nodestate import NodeStateFactory

from flower_gpu.launch import ports

APP = Path(__file__).parent / "clientapp_app"

_NODE = 13
_START_S = 120.0


@dataclass(frozen=True)
class PendingMessage:
    """A message that waits for a ``flwr-clientapp`` to handle it."""

    run_id: int
    task_id: int
    arguments: tuple[str, ...]


class SuperNode:
    """A SuperNode as seen by its ``flwr-clientapp``: an HTTP server in a thread of this process."""

    def __init__(self) -> None:
        # These imports take seconds, which processes that only collect tests should not spend.
        from flwr.cli.build import build_fab_from_disk
        from flwr.supernode.main import create_app

        self._factory = NodeStateFactory(objectstore_factory=ObjectStoreFactory())
        self._factory.state().set_node_id(_NODE)
        content = build_fab_from_disk(APP)
        self._fab = Fab(hashlib.sha256(content).hexdigest(), content, {})
        self._runs = 0
        self.port = ports.free_ports(1)[0]
        config = uvicorn.Config(create_app(self._factory), port=self.port, log_level="error")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run)

    def __enter__(self) -> SuperNode:
        self._thread.start()
        deadline = time.monotonic() + _START_S
        while not self._server.started:
            assert self._thread.is_alive() and time.monotonic() < deadline, "no Runtime API"
            time.sleep(0.01)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: Any, trace: TracebackType | None) -> None:
        self._server.should_exit = True
        self._thread.join()

    def hand_out(
        self,
        config: Mapping[str, Any],
        run_config: Mapping[str, Any] | None = None,
        node_config: Mapping[str, Any] | None = None,
    ) -> PendingMessage:
        """Make a message of a new run available. ``config`` says what the app should do."""
        state = self._factory.state()
        self._runs += 1
        run = Run.create_empty(self._runs)
        run.fab_id, run.fab_version, run.fab_hash = "flower-gpu/watched-app", "1.0.0", self._fab.hash_str
        run.series_id = self._runs
        state.store_run(run)
        state.store_fab(self._fab)
        context = Context(
            run_id=run.run_id,
            node_id=_NODE,
            node_config={"partition-id": 3, **(node_config or {})},
            state=RecordDict(),
            run_config={"use-gpu": False, **(run_config or {})},
            series_id=run.series_id,
        )
        state.set_run_series_context(run.series_id, context)
        task_id = state.create_task(TaskType.CLIENT_APP, run.run_id, self._fab.hash_str)
        assert task_id is not None
        self._put(state, run.run_id, task_id, config)
        token = state.claim_task(task_id)
        assert token is not None
        # Flower gives a command 30 s to begin. A fork server that hangs takes 20 s of these, and on a busy
        # machine the rest is not enough.
        assert state.acknowledge_task_heartbeat(task_id)
        address = f"127.0.0.1:{self.port}"
        return PendingMessage(
            run.run_id, task_id, ("--runtime-api-address", address, "--token", token, "--insecure")
        )

    def reply(self, pending: PendingMessage) -> Message:
        """Return the reply to a message."""
        (message,) = self.replies(pending)
        return message

    def replies(self, pending: PendingMessage) -> list[Message]:
        """Return the reply to a message in a list, which may be empty. Each reply is returned only once."""
        return list(self._factory.state().get_messages_legacy(run_ids=[pending.run_id], is_reply=True))

    def status(self, pending: PendingMessage) -> tuple[str, str]:
        """Return the state in which the task ended, and the reason, as the SuperNode knows them."""
        (task,) = self._factory.state().get_tasks(task_ids=[pending.task_id])
        return task.status.sub_status, task.status.details

    def _put(self, state: Any, run_id: int, task_id: int, config: Mapping[str, Any]) -> None:
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = task_id, run_id, 1
        content = RecordDict({"config": ConfigRecord(dict(config))})
        message = Message(content, dst_node_id=_NODE, message_type="train")
        message.metadata.__dict__["_message_id"] = message.object_id
        state.store_message(message)
        state.object_store.preregister(run_id, get_object_tree(message))
        for object_id, content_object in get_all_nested_objects(message).items():
            state.object_store.put(object_id, content_object.deflate())
