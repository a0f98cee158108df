"""Flower takes a silence of 20 s for the end of a SuperNode or a message, where this folder is on PYTHONPATH.

Without it a test would wait for a minute. Flower has the time between two signs of life as a constant, which
its modules copy when they are imported, so it is changed before.
"""

import sys
from importlib.machinery import PathFinder

_CONSTANTS = "flwr.common.constant"


class _Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != _CONSTANTS:
            return None
        spec = PathFinder.find_spec(name, path, target)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            assert module.HEARTBEAT_DEFAULT_INTERVAL > 10, "no longer what decides"
            module.HEARTBEAT_DEFAULT_INTERVAL = 10  # the least that a SuperLink accepts; two may be missed

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _Finder)
