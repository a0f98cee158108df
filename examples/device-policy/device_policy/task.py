"""The task of a worker. It only reports where it runs, so it needs no framework."""

import os

from flower_gpu.leases.lease import Lease

ON_GPU = {
    ("offer", True): "the node offers, and the run wants one",
    ("force", True): "the node forces it",
    ("force", False): "the node forces it, though the run wants none",
    ("require", True): "the node requires it",
    ("require", False): "the node requires it, though the run wants none",
}
ON_CPU = {
    ("never", True): "the node allows none, though the run wants one",
    ("never", False): "the node allows none",
    ("offer", True): "the node offers what it has, and has no GPU",
    ("offer", False): "the run wants none",
    ("force", True): "the node would force it, and has no GPU",
    ("force", False): "the node would force it, and has no GPU",
}


def train(weights, config, name, policy, use_gpu):
    """Return metrics that say where this worker runs and why. There is no real training."""
    lease = Lease.from_environment(os.environ)  # None if every GPU is hidden from this worker
    where, reasons = "CPU", ON_CPU
    if lease is not None:
        share = lease.shares[0]
        where, reasons = f"GPU {share.index}, {share.memory_bytes / 2**30:.1f} GiB", ON_GPU
    metrics = {"node": name, "policy": policy, "ran-on": where, "why": reasons[policy, use_gpu]}
    return [array + 1 for array in weights], 1, metrics
