#!/usr/bin/env bash
# Four SuperNodes with four device policies, two of them with requests of their own, and two runs: one that
# wants GPUs, and one that does not.
# usage: ./federation.sh [FOLDER FOR LOGS]
set -euo pipefail
logs=${1:-$(mktemp -d -t device-policy-XXXXXX)}
mkdir -p "$logs/flwr"
logs=$(cd "$logs" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")"

port=${PORT:-9400} # and the four after it
link=127.0.0.1:$port
export FLWR_HOME=$logs/flwr FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1
export FLOWER_GPU_RUN_DIR=$logs # every lease is in trace.jsonl there
printf '[superlink.here]\naddress = "%s"\ninsecure = true\n' "$link" >"$FLWR_HOME/config.toml"

pids=()
stop() {
  kill "${pids[@]}" 2>/dev/null || true
  wait
}
trap stop EXIT

flower-superlink --insecure --host 127.0.0.1 --port "$port" --disable-runtime-dependency-installation \
  >"$logs/superlink.log" 2>&1 &
pids+=($!)
until (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; do
  kill -0 "${pids[0]}" 2>/dev/null || { tail "$logs/superlink.log" >&2; exit 1; }
  sleep 0.2
done

node() { # NAME NODE_CONFIG: one node; on machines of their own they would be started just so
  flower-supernode --insecure --superlink "$link" --host 127.0.0.1 --port $((port + ${#pids[@]})) \
    --node-config "name=\"$1\" $2" >"$logs/$1.log" 2>&1 &
  pids+=($!)
}
CUDA_VISIBLE_DEVICES="" node no-gpu '' # stands for a machine without one
node keeps-it 'gpu="never"'
node offers-it 'gpu="offer" gpu-memory="2GiB"' # for each call, whatever the app asks for
node forces-it 'gpu="force" num-gpus=0.25'     # a quarter of one, so that four calls fit

for use_gpu in true false; do
  printf '\nuse-gpu=%s\n| node       | policy  | ran on         | why\n' "$use_gpu"
  flwr run . here --stream --run-config "use-gpu=$use_gpu" >"$logs/run-use-gpu-$use_gpu.log" 2>&1 ||
    { tail "$logs/run-use-gpu-$use_gpu.log" >&2; exit 1; }
  grep '^| ' "$logs/run-use-gpu-$use_gpu.log" ||
    { echo "no results; see $logs" >&2; exit 1; }
done

printf '\nwhat the nodes were told:\n'
for name in no-gpu keeps-it offers-it forces-it; do
  grep -ohE "(this node's policy|this call runs).*" "$logs/$name.log" | sort -u | sed "s/^/$name: /" || true
done
printf '\nlogs and trace.jsonl: %s\n' "$logs"
