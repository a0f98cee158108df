"""Layers of Flower's servers that requests pass by: each answer is as before."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.timeout(120)

#: Asks a SuperLink and a SuperNode, with all layers and without those that are for other requests.
ASK = """
import asyncio, re, sys
import httpx
from flwr.proto.control_pb2 import ListRunsRequest
from flwr.proto.fleet_pb2 import PullMessagesRequest
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flower_gpu.flower import layers

PROTOBUF = {"content-type": "application/protobuf", "accept": "application/protobuf"}
REQUESTS = [
    ("GET", "/health", b""),
    ("GET", "/v1/control/none", b""),
    ("POST", "/v1/control/list-runs", ListRunsRequest().SerializeToString()),
    ("POST", "/v1/control/get-login-details", b""),
    ("POST", "/v1/fleet/pull-messages", PullMessagesRequest().SerializeToString()),
    ("POST", "/v1/runtime/acquire-task", AcquireTaskRequest().SerializeToString()),
    ("POST", "/v1/runtime/acquire-task", b"no protobuf"),
    ("POST", "/v1/runtime/pull-task-input", b""),
    ("GET", "/v1/runtime/pull-task-input", b""),
    ("POST", "/broken", b""),
]

at = re.compile(rb"[0-9:.]{15}")

def answers(app):
    async def ask():
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            found = [
                await client.request(method, path, content=body, headers=PROTOBUF)
                for method, path, body in REQUESTS
            ]
        return [
            (each.status_code, at.sub(b"at", each.content), each.headers.get("cache-control"))
            for each in found
        ]
    return asyncio.run(ask())

def superlink():
    from flwr.superlink.main import create_app
    app = create_app()
    @app.post("/broken")
    def broken():
        raise RuntimeError("not to be told to anybody")
    return app

def supernode():
    from flwr.supercore.object_store import ObjectStoreFactory
    from flwr.supernode.main import create_app
    from flwr.supernode.nodestate import NodeStateFactory
    return create_app(NodeStateFactory(ObjectStoreFactory()))

before = answers(superlink()), answers(supernode())
calls = {}
for (module, name), _ in {**layers._COMMON, **layers._OF_SUPERLINK}.items():
    layer = getattr(sys.modules[module], name)
    calls[name] = layer.__call__
layers.pass_by(is_superlink=True)
after = answers(superlink()), answers(supernode())
assert before == after, (before, after)
print(*(each[0] for each in before[0]))
print(all(getattr(sys.modules[module], name).__call__ is not calls[name]
          for module, name in {**layers._COMMON, **layers._OF_SUPERLINK}))
"""


def test_answers_are_as_with_all_layers() -> None:
    done = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    statuses, all_changed = done.stdout.splitlines()[-2:]
    assert all_changed == "True"
    codes = [int(word) for word in statuses.split()]
    assert codes[0] == 200 and codes[1] == 404
    assert codes[4] == 401, "a SuperNode that shows no key is refused"
    assert codes[5] == 200
    assert codes[-1] == 500
