"""Waits for a whole GPU, and has told nobody that it waits."""

from flower_gpu.leases import ledger
from flower_gpu.leases.admission import Option

ledger._ask = lambda holders, asking: None
wish = ledger.Wish(options=lambda gpus: tuple(Option(gpu.uuid, alone=True) for gpu in gpus))
one = ledger.Ledger()
one.release(one.acquire(wish))
