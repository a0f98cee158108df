"""``python -m flower_gpu.cli``: the ``flower-gpu`` command for environments without it on ``PATH``."""

from __future__ import annotations

import sys

from flower_gpu.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
