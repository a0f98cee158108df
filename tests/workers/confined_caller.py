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
    from confined_calls import run_confined

    from flower_gpu import run_in_worker

    light_servers.begin()
    method, kind, calls = sys.argv[1:]
    options: dict[str, Any] = {"start_method": method, "timeout_s": 100.0}
    report: dict[str, dict[str, Any]] = {}
    for name, task, *arguments in json.loads(calls):
        entry = report[name] = {}
        unpickling.clear()
        try:
            if kind == "confined":
                code = [str(Path(__file__).parent)]
                entry["value"] = run_confined(f"forged_replies:{task}", *arguments, code=code, **options)
            else:
                entry["value"] = run_in_worker(f"forged_replies:{task}", *arguments, **options)
        except Exception as error:
            entry["error"], entry["text"] = type(error).__name__, str(error)
        entry["unpickled"] = [*unpickling]
        entry["peak_kib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps(report))


main()
