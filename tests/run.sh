#!/usr/bin/env bash
# Runs the tests; arguments go to pytest. The first start installs what they need into .venv.
set -euo pipefail
here=$(cd -P "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=scripts/venv.sh
source "$here/scripts/venv.sh"
ensure_venv "$here" dev
cd "$here"
exec "$venv/bin/python" -m pytest "$@"
