# shellcheck shell=bash
# Sourced by run.sh and tests/run.sh: makes the virtual environment of this clone on first use.

say() { printf '%s: %s\n' "${0##*/}" "$*" >&2; }

# Prints the first Python that is new enough, and that has a module where one is named.
find_python() {
  local name
  for name in python3 python3.14 python3.13 python3.12 python3.11 python; do
    if "$name" -c "import ${1:-sys}, sys; sys.exit(sys.version_info < (3, 11))" 2>/dev/null; then
      printf '%s\n' "$name"
      return
    fi
  done
  if [[ $# -gt 0 ]]; then return 1; fi
  say "needs Python 3.11 or newer; python3 here is $(python3 --version 2>/dev/null || echo missing)"
  return 1
}

# Sets `venv` to an environment with the package and one of its extras: that of FLOWER_GPU_VENV as it is, or
# .venv in the clone, made or repaired if need be.
ensure_venv() {
  local clone=$1 extra=$2
  if [[ -n ${FLOWER_GPU_VENV:-} ]]; then
    venv=$FLOWER_GPU_VENV
    check_own_venv
    return
  fi
  venv=$clone/.venv
  # Installed again when the dependencies have changed or the clone was moved.
  local wanted
  wanted="$(cksum <"$clone/pyproject.toml") $clone"
  is_installed || install
}

# Nothing is installed into an environment of the user's: says what is missing there.
check_own_venv() {
  if [[ ! -x $venv/bin/python ]]; then
    say "FLOWER_GPU_VENV=$venv is no virtual environment: it has no bin/python"
    return 2
  fi
  is_new_enough || return 2
  local modules=(flower_gpu)
  if [[ $extra == dev ]]; then modules+=(pytest xdist); fi
  if ! "$venv/bin/python" -P -c 'import sys; from importlib.util import find_spec
sys.exit(not all(map(find_spec, sys.argv[1:])))' "${modules[@]}"; then
    say "FLOWER_GPU_VENV=$venv lacks ${modules[*]}; to install what is missing, PyTorch only if it is not there:" \
      "$(printf '%q' "$venv/bin/python") -m pip install -e $(printf '%q' "${clone}[$extra]")"
    return 2
  fi
  if [[ $extra == dev ]]; then check_own_package; fi
}

# Tests of this clone start programs of the environment: with the package of another one, half of what they run
# would be the other's.
check_own_package() {
  local package
  package=$("$venv/bin/python" -P -c 'import os
from importlib.util import find_spec
print(os.path.realpath(next(iter(find_spec("flower_gpu").submodule_search_locations))))')
  if [[ $package != "$(cd -P "$clone" && pwd)/flower_gpu" ]]; then
    say "the flower-gpu of FLOWER_GPU_VENV=$venv is another checkout, ${package%/flower_gpu}, and not this one," \
      "$clone; to install this one there: $(printf '%q' "$venv/bin/python") -m pip install -e" \
      "$(printf '%q' "${clone}[$extra]")"
    return 2
  fi
}

is_new_enough() {
  if ! "$venv/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    say "needs Python 3.11 or newer; that of $venv is $("$venv/bin/python" --version 2>&1)"
    return 1
  fi
}

# A stamp for each extra: tests need more than a run does.
is_installed() { [[ -e $venv/.flower-gpu-$extra && $(<"$venv/.flower-gpu-$extra") == "$wanted" ]]; }

# Two first starts at once must not install into the same folder: the second waits, and finds it done.
# The lock belongs to an open file, so the kernel lets go of it however this ends.
install() (
  if command -v flock >/dev/null; then flock 9; fi
  if is_installed; then return; fi
  unfinished=$venv/.flower-gpu-unfinished
  # An environment that is there keeps its own Python, whichever comes first on PATH by now.
  if [[ -e $unfinished || ! -e $venv ]]; then
    make_venv || return
  else
    if ! "$venv/bin/python" -c '' 2>/dev/null; then
      say "$venv has no Python that starts: remove it, or set FLOWER_GPU_VENV to another environment"
      return 1
    fi
    is_new_enough || return
    say "installing into $venv, only this once (some minutes, about 6 GB if PyTorch is not there) ..."
  fi
  rm -f "$venv/.flower-gpu-$extra"
  if ! pip_install; then
    say "the installation failed, see above; the next start tries again"
    return 1
  fi
  for installed in "$extra" examples; do # every extra brings what the examples need
    printf '%s\n' "$wanted" >"$venv/.flower-gpu-$installed"
  done
  rm -f "$unfinished"
) 9<"$clone"

make_venv() {
  local python how
  if python=$(find_python ensurepip); then # Debian has it in a package of its own
    how=("$python" -m venv)
  else
    python=$(find_python) || return
    if command -v uv >/dev/null; then
      how=(uv venv --quiet --python "$python")
    elif command -v virtualenv >/dev/null; then
      how=(virtualenv --quiet --python "$python")
    else
      say "$python cannot make virtual environments: install what it lacks, on Debian and Ubuntu by" \
        "\`apt install $("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')\`," \
        "or install uv or virtualenv"
      return 1
    fi
  fi
  say "installing into $venv, only this once (some minutes, about 6 GB with PyTorch) ..."
  rm -rf "$venv" # made here and broken off: nobody knows where
  mkdir "$venv"
  touch "$unfinished"
  "${how[@]}" "$venv"
  touch "$unfinished" # uv may have removed it
}

pip_install() {
  local wanted_here="${clone}[$extra]"
  if "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    "$venv/bin/python" -m pip install --quiet --quiet --disable-pip-version-check -e "$wanted_here"
  elif command -v uv >/dev/null; then # one that uv has made has no pip
    uv pip install --quiet --python "$venv/bin/python" -e "$wanted_here"
  else
    say "$venv has no pip: install uv, or run \`$venv/bin/python -m ensurepip\`"
    return 1
  fi
}
