"""Makes calls in confined workers, as ``flower-gpu supernode --confine`` does for messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flower_gpu.calls.runner import run_call
from flower_gpu.calls.settings import call_settings
from flower_gpu.programs.confine import Allowed, for_message


def run_confined(
    task: str, *args: Any, allowed: Allowed | None = None, code: Sequence[str] = (), **options: Any
) -> Any:
    """Run a task in a confined worker.

    ``allowed``: paths and ports that the worker can also use.
    ``code``: folders with the code of the app.
    ``options``: options of the call.
    """
    settings = call_settings(options)
    with for_message(allowed or Allowed(), list(code)) as confinement:
        return run_call(
            task, args, settings=settings.with_worker(confinement=confinement), kind="train", by_name=True
        )
