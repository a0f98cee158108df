#!/usr/bin/env bash
# Runs the tests; arguments go to pytest. The first start installs into .venv beside run.sh.
set -euo pipefail
here=$(cd -P "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$("$here/scripts/venv.sh" dev)
cd "$here"
exec "$venv/bin/python" -m pytest "$@"
