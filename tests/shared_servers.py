"""Fork servers that the programs of all tests may share: each new one imports for seconds."""

from __future__ import annotations

import os

#: For programs whose tests do not mind what else is in the state folder.
SHARED_STATE = {
    "FLOWER_GPU_STATE_DIR": os.environ["TESTS_SHARED_STATE_DIR"],
    "FLOWER_GPU_SERVER_IDLE_S": "300",
    "MKL_CBWR": "AUTO",  # workers have it with --deterministic: then the command's server is theirs
}
