"""A module whose import takes its time."""

import time

time.sleep(1)


def answer() -> int:
    return 42
