"""An agent on a host that receives a model only when a file appears. The file's path is the argument.

Prints the ids of the messages handled before the file appears, of those handled in the end, and the error of
a last model that cannot be fetched.
"""

from __future__ import annotations

import os
import pickle
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import ray
from flwr.app import ArrayRecord, Message, RecordDict

from flower_gpu.calls.settings import call_settings
from flower_gpu.simulation import run as runs
from flower_gpu.simulation.cluster.agent import Agent
from flower_gpu.simulation.cluster.models import SentModels
from flower_gpu.simulation.host import AssignedMessage, Work
from flower_gpu.simulation.in_worker import AppReference
from flower_gpu.simulation.nodes import VirtualNodes

APP, HAS_ARRIVED = Path(__file__).parents[2] / "app", Path(sys.argv[1])
KIND_OF_SLOW = sys.argv[2]


def get(where: tuple[bytes, bool]) -> Any:
    """Stand in for Ray, which is not started."""
    data, is_slow = where
    if data == pickle.dumps(LOST):
        raise OSError("the object is lost")
    while is_slow and not HAS_ARRIVED.exists():
        time.sleep(0.01)
    return pickle.loads(data)


def put(item: Any) -> tuple[bytes, bool]:
    is_slow = isinstance(item, bytes) if KIND_OF_SLOW == "state" else item is SLOW
    return pickle.dumps(item), is_slow


def visit(number: int, model: ArrayRecord, state: bytes = b"") -> AssignedMessage:
    message = Message(RecordDict({"arrays": model}), NODES.ids[number], "train", group_id="1")
    message.metadata.__dict__["_message_id"] = str(number)
    return AssignedMessage(message, number, state)


CONFIG = tomllib.loads((APP / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
NODES = VirtualNodes(4, 1, 5, CONFIG)
SLOW, HERE, LOST = (ArrayRecord([np.full(3, number, np.float32)]) for number in range(3))
with runs._identity(5):
    os.chdir(APP)
    ray.get = get
    agent = Agent(Work("scripted", AppReference(APP, "scripted.client_app:app"), call_settings({}), NODES))
    agent.begin([])
    sent = SentModels(put)
    if KIND_OF_SLOW == "state":
        from flower_gpu.flower import record_bytes

        state = RecordDict({"kept": ArrayRecord([np.zeros(100_000, np.float32)])})
        slow = [visit(0, HERE, bytes(record_bytes.encode(state)))]
    else:
        slow = [visit(0, SLOW), visit(1, SLOW)]
    agent.submit([sent.packed(each) for each in slow])
    found, news = agent.exchange([sent.packed(visit(2, HERE))])
    done = [answer.message_id for answer in found.outcomes]
    while "2" not in done:
        done += [answer.message_id for answer in agent.exchange([])[0].outcomes]
    print(done, flush=True)
    HAS_ARRIVED.touch()
    while len(done) < 1 + len(slow):
        done += [answer.message_id for answer in agent.exchange([])[0].outcomes if answer.reply.has_content()]
    print(sorted(done), flush=True)
    agent.submit([sent.packed(visit(3, LOST))])
    error = ""
    while not error:
        try:
            agent.exchange([])
        except OSError as lost:
            error = str(lost)
    print([error], flush=True)
    agent.close()
