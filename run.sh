#!/usr/bin/env bash
# Runs the quickstart, or another Flower app, with several clients on this machine.
# Everything but the first installation is done by `flower-gpu launch`.
set -euo pipefail

# The folder of this script, also when it is called through a link.
self=${BASH_SOURCE[0]}
while [[ -L $self ]]; do
  target=$(readlink "$self")
  [[ $target == /* ]] || target=$(dirname "$self")/$target
  self=$target
done
here=$(cd -P "$(dirname "$self")" && pwd)

# shellcheck source=scripts/venv.sh
source "$here/scripts/venv.sh"

app=${FLOWER_GPU_APP:-$here/examples/quickstart}
if [[ $# -gt 0 && $1 != -* ]]; then
  app=$1
  shift
fi

for argument in "$@"; do
  if [[ $argument == -h || $argument == --help ]]; then
    python=$(find_python)
    cat <<EOF
usage: ./run.sh [APP_DIR] [options]

Runs a Flower app with several clients on this machine: examples/quickstart, or the app in APP_DIR
(or in \$FLOWER_GPU_APP). The first start installs the package into .venv beside this script;
FLOWER_GPU_VENV=DIR uses an existing virtual environment as it is and installs nothing.
The options are those of \`flower-gpu launch\`:

EOF
    PYTHONPATH=$here exec "$python" -B -m flower_gpu.cli launch "$app" --help
  fi
done

ensure_venv "$here" examples

# -P: modules in the current folder must not hide those of the package.
exec "$venv/bin/python" -P -m flower_gpu.cli launch "$app" "$@"
