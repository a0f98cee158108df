"""Waits for a lease with a reserve that leaves no room for it, and releases the lease."""

from flower_gpu.leases import ledger
from flower_gpu.leases.admission import GPUNeed

RESERVE_BYTES = 2 << 30
FEW_BYTES = 100 << 20

waiting_ledger = ledger.Ledger(reserve_bytes=RESERVE_BYTES)
claimant = ledger.Claimant(lambda gpus: tuple(GPUNeed(gpu.uuid, memory_bytes=FEW_BYTES) for gpu in gpus))
waiting_ledger.release(waiting_ledger.acquire(claimant))
