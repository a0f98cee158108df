"""Descriptions of apps that exit their process, with ``sys.exit`` or through ``argparse``."""

from __future__ import annotations

import traceback

from flower_gpu.workers.call_end import place_of

_PARSER = "argparse"
_HINT = (
    "Its argparse has read the command line of the program that imports the app, so the options in the error "
    'above are not the app\'s. Call parse_args() under `if __name__ == "__main__":` only, and take settings '
    "of a run from context.run_config"
)


def is_asked_by_flower(error: SystemExit) -> bool:
    """Return True if Flower's own code raised the exit, as its signal handlers do."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__")).startswith("flwr.")


def describe_exit(error: SystemExit, component: str) -> str:
    """Return a sentence about an app that exited, with a hint if ``argparse`` caused the exit.

    ``component``: the part of the app, such as ``"ServerApp"``.
    """
    text = f"the {component} exited: sys.exit({error.code!r}) in {place_of(error)}"
    modules = {frame.f_globals.get("__name__") for frame, _ in traceback.walk_tb(error.__traceback__)}
    return f"{text}. {_HINT}" if _PARSER in modules else text
