# shellcheck shell=bash
# Sourced by .ci/run and tests/nightly.sh: the tests that depend on the versions of flwr and torch.

# Runs a command with HOME, PATH and the given variables only.
bare() { env -i HOME="$HOME" PATH="$PATH" "$@"; }

# `test_versions PYTHON`: with flwr, tests of records, strategies, clocks, private names, the doctor, a federation with
# each engine, and a simulation; with torch, tests of caps, leases, footprints and memory that runs out, on the
# stand-in for CUDA.
test_versions() {
  local with_flwr=(tests/flower/test_{arrays,client,plain_message,private_names}.py tests/strategies/test_{rounds,strategy,streaming}.py
    tests/programs/test_{objects,superlink,supernode_clock,wakeup}.py tests/flower/mod/test_mod_state.py
    tests/cli/test_doctor.py::test_two_distributions_of_flower_are_a_problem tests/launch/test_launch_waits.py
    tests/examples/test_federations.py::test_failing_clients_and_distributed_gpus
    tests/simulation/test_simulate_runs.py::test_each_message_has_its_own_worker_and_states_are_kept
    tests/simulation/test_flowers_grid.py)
  local with_torch=(tests/cuda_stub/test_on_gpu.py tests/frameworks/test_cap.py tests/frameworks/test_pytorch_memory.py
    tests/frameworks/test_out_of_memory.py tests/calls/test_leased_worker.py)
  bare "$1" -m pytest -q -p no:cacheprovider -n 2 --dist loadfile "${with_flwr[@]}" "${with_torch[@]}"
}
