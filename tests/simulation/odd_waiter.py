"""Waits for a lease as with another reserve, by which there is no room, and gives it back."""

from flower_gpu.leases import ledger
from flower_gpu.leases.admission import CardRequest

RESERVE_BYTES = 2 << 30
FEW_BYTES = 100 << 20

one = ledger.Ledger(reserve_bytes=RESERVE_BYTES)
wish = ledger.Wish(options=lambda gpus: tuple(CardRequest(gpu.uuid, memory_bytes=FEW_BYTES) for gpu in gpus))
one.release(one.acquire(wish))
