# shellcheck shell=bash
# Sourced by run.sh and tests/run.sh: makes the virtual environment of this clone on first use.

say() { printf '%s: %s\n' "${0##*/}" "$*" >&2; }

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

# Sets `venv` to an environment with the package and one of its extras: that of FLOWER_GPU_VENV as it is, or
# .venv in the clone, made or repaired if need be.
ensure_venv() {
  local clone=$1 extra=$2
  if [[ -n ${FLOWER_GPU_VENV:-} ]]; then
    venv=$FLOWER_GPU_VENV
    if [[ ! -x $venv/bin/python ]]; then
      say "FLOWER_GPU_VENV=$venv is no virtual environment: it has no bin/python"
      return 2
    fi
    return
  fi
  venv=$clone/.venv
  # Installed again when the dependencies have changed or the clone was moved.
  local wanted
  wanted="$(cksum <"$clone/pyproject.toml") $clone"
  is_installed || install
}

# A stamp for each extra: tests need more than a run does.
is_installed() { [[ -e $venv/.flower-gpu-$extra && $(<"$venv/.flower-gpu-$extra") == "$wanted" ]]; }

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
  rm -f "$venv/.flower-gpu-$extra"
  "$python" -m venv ${fresh[@]+"${fresh[@]}"} "$venv"
  touch "$unfinished" # --clear has removed it
  if ! "$venv/bin/python" -m pip install --quiet --quiet --disable-pip-version-check -e "${clone}[$extra]"; then
    say "the installation failed, see above; the next start tries again"
    return 1
  fi
  for installed in "$extra" examples; do # every extra brings what the examples need
    printf '%s\n' "$wanted" >"$venv/.flower-gpu-$installed"
  done
  rm -f "$unfinished"
) 9<"$clone"
