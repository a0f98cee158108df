#!/usr/bin/env bash
# Runs the GPU tests and benchmarks on a host that has torch and no network, and leaves logs, figures and plots in
# one folder. benchmarks/README.md says how.
set -uo pipefail

usage() {
  cat <<END
usage: benchmarks/gpu/host.sh OUT [--wheels DIR] [--data NPZ] [--device cuda|stub] [--python PYTHON] [tests] [PART,PART]

OUT        folder for the results; made where it is missing
--wheels   folder of wheels with what is missing there; installed into a temporary folder, nothing else is
--data     images, see python -m benchmarks.gpu --help
--device   stub: a rehearsal without a GPU, everything tiny
--python   default: python3
tests      run the tests marked gpu
PART,PART  parts of benchmarks.gpu to run; without tests and parts: everything
END
}

fail() {
  echo "host.sh: $1" >&2
  exit 2
}

[[ $# -gt 0 && $1 != -* ]] || { usage >&2; exit 2; }
out=$1
shift
wheels= data= device=cuda python=python3 tests= parts=
while [[ $# -gt 0 ]]; do
  case $1 in
    --wheels | --data | --device | --python)
      [[ $# -gt 1 ]] || fail "$1 needs a value"
      declare "${1#--}=$2"
      shift
      ;;
    tests) tests=yes ;;
    -h | --help) usage; exit ;;
    -*) fail "there is no option $1" ;;
    *) parts=${parts:+$parts,}$1 ;;
  esac
  shift
done
[[ $device == cuda || $device == stub ]] || fail "--device is cuda or stub, not $device"
[[ -n $tests || -n $parts ]] || { tests=yes; parts=all; }

here=$(cd -P "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
mkdir -p "$out" || exit 2
out=$(cd "$out" && pwd)
[[ -z $data ]] || data=$(realpath -e "$data") || exit 2
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
if [[ -n $wheels ]]; then
  "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$site" "$wheels"/*.whl || exit 2
fi
export PYTHONPATH="$site:$here${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
cd "$here"
status=0

{
  date -u +%FT%TZ
  "$python" -c 'import platform, torch; print("python", platform.python_version(), "torch", torch.__version__, "cuda", torch.version.cuda)'
  nproc
  nvidia-smi || echo "no nvidia-smi"
  "$python" -m flower_gpu.cli gpus
} >"$out/host.log" 2>&1

if [[ -n $tests ]]; then
  "$python" -m pytest -p no:cacheprovider -m gpu -v -s --durations=0 tests/on_gpu 2>&1 | tee "$out/tests.log" || status=1
fi

if [[ -n $parts ]]; then
  options=(--device "$device" --json "$out/gpu.json")
  [[ $parts == all ]] || options+=(--only "$parts")
  [[ $device != stub ]] || options+=(--quick)
  [[ -z $data ]] || options+=(--data "$data")
  if "$python" -c 'import matplotlib' 2>/dev/null; then options+=(--plot "$out/gpu.png"); fi
  "$python" -m benchmarks.gpu "${options[@]}" 2>&1 | tee "$out/gpu.log" || status=1
  if [[ $parts == all && $device == cuda ]]; then
    "$python" -m benchmarks.ranks --device cuda --json "$out/ranks.json" 2>&1 | tee "$out/ranks.log" || status=1
  fi
fi
exit $status
