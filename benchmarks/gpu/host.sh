#!/usr/bin/env bash
# Runs the GPU tests and benchmarks on a host that has torch and no network, and leaves logs, figures and plots in
# one folder. README.md beside this file says how.
set -uo pipefail

usage() {
  cat <<END
usage: benchmarks/gpu/host.sh OUT [options] [facts] [PART,PART] [tests] [simulation] [ranks]

OUT         folder for the results; made where it is missing
facts       what this host is: driver, card, device files, kernel, flower-gpu doctor
tests       run the tests marked gpu
simulation  simulations beside Ray
ranks       distributed functions; not on the stand-in
PART,PART   parts of benchmarks.gpu to run
            They run in the order given; without any of them all do
--wheels    folder of wheels with what is missing there; installed into a temporary folder, nothing else is.
            May be repeated
--data      images, see python -m benchmarks.gpu --help
-k          of tests: those that this expression selects, as pytest's
--seconds   end what is running after so long, with what it has measured until then
--stand-in  a rehearsal without a GPU, on tests/cuda_stub, with everything tiny; needs a C compiler
--python    default: python3

Exit status: 0, or 1 if something failed, or no test ran; 2 for options that cannot be used.
END
}

fail() {
  echo "host.sh: $1" >&2
  exit 2
}

[[ $# -gt 0 && $1 != -* ]] || { usage >&2; exit 2; }
out=$1
shift
data= python=python3 k= seconds= stand_in= parts=
wheels=() steps=()
while [[ $# -gt 0 ]]; do
  case $1 in
    --wheels | --data | --python | --seconds | -k)
      [[ $# -gt 1 ]] || fail "$1 needs a value"
      if [[ $1 == --wheels ]]; then wheels+=("$2"); else name=${1#-}; declare "${name#-}=$2"; fi
      shift
      ;;
    facts | tests | simulation | ranks) steps+=("$1") ;;
    --stand-in) stand_in=yes ;;
    -h | --help) usage; exit ;;
    -*) fail "there is no option $1" ;;
    *)
      [[ -n $parts ]] || steps+=(benchmarks)
      parts=${parts:+$parts,}$1
      ;;
  esac
  shift
done
[[ -z $seconds || $seconds =~ ^[1-9][0-9]*$ ]] || fail "--seconds is a whole number, not $seconds"
[[ ${#steps[@]} -gt 0 ]] || steps=(facts benchmarks tests simulation ranks)

here=$(cd -P "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
mkdir -p "$out" || exit 2
out=$(cd "$out" && pwd)
[[ -z $data ]] || data=$(realpath -e "$data") || exit 2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
for folder in "${wheels[@]}"; do
  "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$work/site" \
    "$folder"/*.whl || exit 2
done
export PYTHONPATH="$work/site:$here${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
cd "$here"
status=0

# Runs a command, on the stand-in where there is no GPU, and ends it with a signal when the time is over.
on_host() {
  local signal=$1 limit=()
  shift
  [[ -z $seconds ]] || limit=(timeout "--signal=$signal" --kill-after=20 "$((seconds > SECONDS ? seconds - SECONDS : 1))")
  if [[ -z $stand_in ]]; then
    "${limit[@]}" "$@"
  else
    PYTHONPATH="$here/tests:$PYTHONPATH" "${limit[@]}" \
      "$python" -m cuda_stub --host "$work/host" --set context_ms=100 -- "$@"
  fi
}

facts() {
  date -u +%FT%TZ
  "$python" -c 'import platform, torch; print("python", platform.python_version(), "torch", torch.__version__, "cuda", torch.version.cuda)'
  "$python" -c 'from flower_gpu import landlock; print("Landlock: version", landlock.version())'
  uname -srm
  nproc
  free -m
  df -h /tmp /dev/shm
  ls -l /dev/nvidia* /dev/dri /dev/infiniband 2>/dev/null
  cat /proc/driver/nvidia/version /proc/self/cgroup
  grep -i nvidia /proc/self/mountinfo
  "$python" -m flower_gpu.cli gpus
  "$python" -m flower_gpu.cli doctor
  nvidia-smi
  nvidia-smi -q
  "$python" -m pip list
}

tests() {
  on_host INT "$python" -m pytest -p no:cacheprovider -n 0 -m gpu ${k:+-k "$k"} -v -s -rs --durations=0 tests/on_gpu 2>&1 |
    tee "$out/tests.log"
  local result=${PIPESTATUS[0]}
  # Where all are skipped pytest ends with status 0. But this host is said to have a GPU.
  tail -n 3 "$out/tests.log" | grep -qE '[0-9]+ passed' || { echo "host.sh: no test has passed" >&2; result=1; }
  return "$result"
}

benchmarks() {
  local options=(--json "$out/gpu.json")
  [[ -z $parts ]] || options+=(--only "$parts")
  [[ -z $stand_in ]] || options+=(--quick --model elementwise)
  [[ -z $data ]] || options+=(--data "$data")
  if "$python" -c 'import matplotlib' 2>/dev/null; then options+=(--plot "$out/gpu.png"); fi
  on_host TERM "$python" -m benchmarks.gpu "${options[@]}" 2>&1 | tee "$out/gpu.log"
  return "${PIPESTATUS[0]}"
}

simulation() {
  local options=(--only resnet --runs 1 --json "$out/simulation.json")
  [[ -z $stand_in ]] || options+=(--quick --model elementwise)
  [[ -z $data ]] || options+=(--data "$data")
  on_host TERM "$python" -m benchmarks.simulation "${options[@]}" 2>&1 | tee "$out/simulation.log"
  return "${PIPESTATUS[0]}"
}

ranks() {
  [[ -z $stand_in ]] || return 0
  on_host TERM "$python" -m benchmarks.ranks --device cuda --json "$out/ranks.json" 2>&1 | tee "$out/ranks.log"
  return "${PIPESTATUS[0]}"
}

for step in "${steps[@]}"; do
  if [[ $step == facts ]]; then
    # Each of them may be missing here, or fail: that is a fact as well.
    export -f facts
    export python
    on_host TERM bash -c facts >"$out/facts.log" 2>&1
  else
    "$step" || status=1
  fi
done
exit $status
