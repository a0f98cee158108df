#!/usr/bin/env bash
# Runs the tests; arguments go to pytest. The first start installs what they need into .venv.
set -euo pipefail
here=$(cd -P "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=scripts/venv.sh
source "$here/scripts/venv.sh"
ensure_venv "$here" dev
cd "$here"
# Files run four at a time, also on two cores, as much of a test is waiting; one after the other where there is
# a GPU, because tests measure what is used of the whole card. A debugger needs -n 0.
processes=4
if compgen -G '/dev/nvidia[0-9]*' >/dev/null; then processes=0; fi
exec "$venv/bin/python" -m pytest -n "$processes" --dist loadfile --no-loadscope-reorder "$@"
