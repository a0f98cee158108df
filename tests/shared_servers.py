"""Fork servers that programs of all tests may share, because each new server imports for seconds."""

from __future__ import annotations

import os

#: Variables for programs in tests that do not depend on the content of the state folder.
SHARED_STATE = {
    "FLOWER_GPU_STATE_DIR": os.environ["TESTS_SHARED_STATE_DIR"],
    "FLOWER_GPU_SERVER_IDLE_S": "300",
    # Workers have this variable with --deterministic. A command that has it too shares its server with them.
    "MKL_CBWR": "AUTO",
}
