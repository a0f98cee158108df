"""A server of uvicorn that looks once a second whether it should end."""

from __future__ import annotations

import signal

import pytest
from run_programs import run_python

pytestmark = pytest.mark.timeout(60)

#: A server in a thread, ended as a SuperNode ends its own, and one that a signal ends, as a SuperLink.
SERVE = """
import os, signal, threading, time
import httpx, uvicorn
from flower_gpu.flower.waits import ticks

ticks.look_seldom()
ticks.look_seldom()
looks = 0
on_tick = uvicorn.Server.on_tick

async def counted(self, counter):
    global looks
    looks += 1
    return await on_tick(self, counter)

uvicorn.Server.on_tick = counted

async def app(scope, receive, send):
    if scope["type"] == "http":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"here"})

def server():
    return uvicorn.Server(uvicorn.Config(app, port=0, lifespan="off", log_level="error"))

first = server()
began_s = time.monotonic()
thread = threading.Thread(target=first.run)
thread.start()
while not first.started:
    time.sleep(0.01)
port = first.servers[0].sockets[0].getsockname()[1]
answer = httpx.get(f"http://127.0.0.1:{port}")
print(answer.text, "date" in answer.headers)
thread.join(0.5)
assert not first.should_exit
first.should_exit = True
thread.join()
print(looks, time.monotonic() - began_s)
second = server()
threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
second.run()
"""


def test_a_server_looks_seldom_and_ends_when_it_is_told() -> None:
    done = run_python(SERVE)
    here, line = done.stdout.splitlines()
    assert here == "here True", done.stderr
    looks, seconds = map(float, line.split())
    assert 2 <= looks <= seconds + 3, "uvicorn's own looks ten times a second"
    assert done.returncode == -signal.SIGTERM, done.stderr
