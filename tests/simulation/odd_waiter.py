"""Waits for a lease as other versions and settings do, and gives it back: ``python odd_waiter.py silent``."""

import sys

from flower_gpu.leases import ledger
from flower_gpu.leases.admission import Option

RESERVE_BYTES = 2 << 30
FEW_BYTES = 100 << 20

one = ledger.Ledger()
option = {"alone": True}
if sys.argv[1] == "silent":  # it tells nobody that it waits
    ledger._ask = lambda holders, asking: None
else:  # by its reserve there is no room, and by that of others there is
    one = ledger.Ledger(reserve_bytes=RESERVE_BYTES)
    option = {"memory_bytes": FEW_BYTES}
one.release(one.acquire(ledger.Wish(options=lambda gpus: tuple(Option(gpu.uuid, **option) for gpu in gpus))))
