"""A program that runs calls in confined workers and reports what it unpickled meanwhile.

``python confined_caller.py METHOD confined|free CALLS``, with the calls as JSON:
lists of a name, a task and its arguments.
"""

from __future__ import annotations

import json
import pickle
import resource
import sys
from pathlib import Path
from typing import Any

unpickling: list[str] = []


class Recording(pickle.Unpickler):
    def load(self) -> Any:
        unpickling.append("Unpickler.load")
        return super().load()


def recorded(name: str, function: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        unpickling.append(name)
        return function(*args, **kwargs)

    return call


def main() -> None:
    pickle.loads, pickle.load = recorded("loads", pickle.loads), recorded("load", pickle.load)
    pickle.Unpickler = Recording  # type: ignore[misc]
    sys.addaudithook(
        lambda event, args: unpickling.append(str(args)) if event == "pickle.find_class" else None
    )

    import light_servers

    from flower_gpu.calls.runner import run_call
    from flower_gpu.calls.settings import call_settings
    from flower_gpu.programs.confine import Allowed, for_message

    light_servers.begin()
    method, kind, calls = sys.argv[1:]
    settings = call_settings({"start_method": method, "timeout_s": 100.0})
    report: dict[str, dict[str, Any]] = {}
    for name, task, *arguments in json.loads(calls):
        entry = report[name] = {}
        unpickling.clear()
        with for_message(Allowed(), [str(Path(__file__).parent)]) as confinement:
            try:
                entry["value"] = run_call(
                    f"confined_tasks:{task}",
                    arguments,
                    settings=settings.with_worker(confinement=confinement if kind == "confined" else None),
                    kind="train",
                    by_name=True,
                )
            except Exception as error:
                entry["error"], entry["text"] = type(error).__name__, str(error)
        entry["unpickled"] = [*unpickling]
        entry["peak_kib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps(report))


main()
