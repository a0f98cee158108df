#!/usr/bin/env bash
# Runs the quickstart, or another Flower app, with several clients on this machine.
# Everything but the first installation is done by `flower-gpu launch`.
set -euo pipefail

say() { printf 'run.sh: %s\n' "$*" >&2; }

# The folder of this script, also when it is called through a link.
self=${BASH_SOURCE[0]}
while [[ -L $self ]]; do
  target=$(readlink "$self")
  [[ $target == /* ]] || target=$(dirname "$self")/$target
  self=$target
done
here=$(cd -P "$(dirname "$self")" && pwd)

find_python() {
  local name
  for name in python3 python3.14 python3.13 python3.12 python3.11 python; do
    if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      printf '%s\n' "$name"
      return
    fi
  done
  say "needs Python 3.11 or newer; python3 here is $(python3 --version 2>/dev/null || echo missing)"
  return 1
}

# Two first starts at once must not install into the same folder: the second waits, and finds it done.
# The lock belongs to an open file, so the kernel lets go of it however this ends.
install() (
  if command -v flock >/dev/null; then flock 9; fi
  if is_installed; then return; fi
  python=$(find_python)
  say "installing into $venv, only this once (some minutes, about 6 GB with PyTorch) ..."
  unfinished=$venv/.flower-gpu-unfinished
  fresh=()
  if [[ -e $unfinished ]]; then fresh=(--clear); fi # an installation was broken off: nobody knows where
  mkdir -p "$venv"
  touch "$unfinished"
  rm -f "$stamp"
  "$python" -m venv ${fresh[@]+"${fresh[@]}"} "$venv"
  touch "$unfinished" # --clear has removed it
  if ! "$venv/bin/python" -m pip install --quiet --quiet --disable-pip-version-check -e "${here}[examples]"; then
    say "the installation failed, see above; the next start tries again"
    return 1
  fi
  printf '%s\n' "$wanted" >"$stamp"
  rm -f "$unfinished"
) 9<"$here"

is_installed() { [[ -e $stamp && $(<"$stamp") == "$wanted" ]]; }

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

if [[ -n ${FLOWER_GPU_VENV:-} ]]; then
  venv=$FLOWER_GPU_VENV
  if [[ ! -x $venv/bin/python ]]; then
    say "FLOWER_GPU_VENV=$venv is no virtual environment: it has no bin/python"
    exit 2
  fi
else
  venv=$here/.venv
  stamp=$venv/.flower-gpu-installed
  # Installed again when the dependencies have changed or the clone was moved.
  wanted="$(cksum <"$here/pyproject.toml") $here"
  is_installed || install
fi

# -P: modules in the current folder must not hide those of the package.
exec "$venv/bin/python" -P -m flower_gpu.cli launch "$app" "$@"
