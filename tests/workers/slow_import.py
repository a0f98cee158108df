"""A module that takes a second to import."""

import time

time.sleep(1)


def answer() -> int:
    return 42
