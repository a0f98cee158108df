"""The variables by which a worker sees the GPUs of its lease, and no others."""

from __future__ import annotations

from flower_gpu.calls import environment
from flower_gpu.leases.lease import Lease, Share

GIB = 2**30
SHARES = tuple(Share(f"GPU-{number}", number, "A GPU", 16 * GIB, 5 * GIB, 4 * GIB) for number in range(2))


def test_a_worker_sees_the_gpus_of_its_lease_in_order_and_can_read_it() -> None:
    both = Lease("ab12", SHARES)
    variables = environment.of_worker(both, {})
    assert variables["CUDA_VISIBLE_DEVICES"] == "GPU-0,GPU-1"
    assert variables["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert Lease.from_environment(variables) == both
    assert float(variables["XLA_PYTHON_CLIENT_MEM_FRACTION"]) == 0.25


def test_a_worker_without_gpu_sees_none_and_has_no_lease() -> None:
    variables = environment.of_worker(None, {})
    assert variables["CUDA_VISIBLE_DEVICES"] == ""
    assert Lease.from_environment(variables) is None
