#!/usr/bin/env bash
# Runs the GPU tests and benchmarks on a host that has torch and no network, and writes logs and figures to one
# folder. README.md in this folder explains it.
set -uo pipefail

usage() {
  cat <<END
usage: benchmarks/gpu/host.sh OUT [options] [facts] [PART,PART] [tests] [simulation]

OUT         folder for the results; created if missing
facts       describe the host: driver, GPU, device files, kernel, flower-gpu doctor
tests       run the tests marked gpu
simulation  run the simulations beside Ray
PART,PART   run these parts of benchmarks.gpu
            Steps run in the given order; by default, all of them run
--wheels    folder of wheels to install into a temporary folder. May be repeated
--data      images, see python -m benchmarks.gpu --help
-k          run only the tests that this expression of pytest selects
--seconds   end the running step after this time, with the figures so far
--stand-in  rehearse without a GPU, on tests/cuda_stub, with tiny sizes; needs a C compiler
--python    default: python3

Exit status: 0; 1 if a step failed, or no test ran; 2 for wrong options.
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
    facts | tests | simulation) steps+=("$1") ;;
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
[[ -z $seconds || $seconds =~ ^[1-9][0-9]*$ ]] || fail "--seconds must be a whole number, not $seconds"
[[ ${#steps[@]} -gt 0 ]] || steps=(facts benchmarks tests simulation)

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

# Runs a command, on the stand-in if there is no GPU, and sends it a signal when the time is over.
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
  # pytest exits with status 0 if all tests are skipped. But this host should have a GPU.
  tail -n 3 "$out/tests.log" | grep -qE '[0-9]+ passed' || { echo "host.sh: no test has passed" >&2; result=1; }
  return "$result"
}

benchmarks() {
  local options=(--json "$out/gpu.json")
  [[ -z $parts ]] || options+=(--only "$parts")
  [[ -z $stand_in ]] || options+=(--quick --model elementwise)
  [[ -z $data ]] || options+=(--data "$data")
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

for step in "${steps[@]}"; do
  if [[ $step == facts ]]; then
    # Some of these commands may be missing or fail. Their errors are facts as well.
    export -f facts
    export python
    on_host TERM bash -c facts >"$out/facts.log" 2>&1
  else
    "$step" || status=1
  fi
done
exit $status
