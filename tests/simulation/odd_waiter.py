"""Waits for a lease as with another reserve, by which there is no room, and gives it back."""

from flower_gpu.leases import ledger
from flower_gpu.leases.admission import GPUNeed

RESERVE_BYTES = 2 << 30
FEW_BYTES = 100 << 20

one = ledger.Ledger(reserve_bytes=RESERVE_BYTES)
claimant = ledger.Claimant(lambda gpus: tuple(GPUNeed(gpu.uuid, memory_bytes=FEW_BYTES) for gpu in gpus))
one.release(one.acquire(claimant))
