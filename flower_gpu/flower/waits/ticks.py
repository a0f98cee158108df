"""Flower's HTTP servers look ten times a second whether they should end; here one is told, and looks once.

*Measured* on two cores: those looks are nearly all that a SuperNode without work does, 0.12 s of a core in
a minute.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any, Final

_EXIT: Final = "should_exit"
_TICK_S: Final = 1.0
_TICKS: Final = 10  # of uvicorn's own in that time: with so many it renews the date in its answers


def look_seldom() -> None:
    """Have uvicorn's servers in this process look once a second, and at once when they are told to end."""
    import uvicorn

    server: Any = uvicorn.Server
    if hasattr(server, "main_loop") and hasattr(server, "on_tick") and not hasattr(server, _EXIT):
        setattr(server, _EXIT, property(_should_exit, _set_should_exit))
        server.main_loop = _main_loop


def _should_exit(server: Any) -> bool:
    return bool(vars(server).get(_EXIT, False))


def _set_should_exit(server: Any, value: bool) -> None:
    vars(server)[_EXIT] = value
    if value and (tell := vars(server).get("_tell_exit")) is not None:
        with suppress(RuntimeError):  # it has ended
            tell()


async def _main_loop(server: Any) -> None:
    loop, told = asyncio.get_running_loop(), asyncio.Event()
    server._tell_exit = lambda: loop.call_soon_threadsafe(told.set)
    counter = 0
    while not await server.on_tick(counter):
        counter += _TICKS
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(told.wait(), _TICK_S)
