"""What Ray does to the environment of its actors, and what it was before.

Ray hides all GPUs from an actor that asked it for none, and all but some from others. Both are guesses about
who uses what; leases know.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

_RAYLET = "RAY_RAYLET_PID"  # set by Ray in every worker process of its own
_VISIBLE = "CUDA_VISIBLE_DEVICES"


def undone(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which the GPUs are visible that Ray itself was started with.

    Parameters
    ----------
    environ : mapping of str to str
        This process's environment.

    Returns
    -------
    dict of str to str
        A copy; unchanged outside of Ray's actors, and where what Ray was started with cannot be read.
    """
    found = dict(environ)
    raylet = environ.get(_RAYLET, "")
    if not raylet.isdecimal() or int(raylet) != os.getppid():
        return found
    try:
        with open(f"/proc/{raylet}/environ", "rb") as file:
            text = file.read()
    except OSError:
        return found
    variables = dict(line.split("=", 1) for line in os.fsdecode(text).split("\0") if "=" in line)
    found.pop(_VISIBLE, None)
    return found | {name: value for name, value in variables.items() if name == _VISIBLE}
