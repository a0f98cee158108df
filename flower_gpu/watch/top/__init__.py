"""``flower-gpu top``: what runs on this host's GPUs now: GPUs, workers and what waits for a lease.

The watcher looks at ledger, driver and the histories of runs, and puts rows together to a snapshot.
``--json`` prints the snapshot; the view makes lines of it, which are printed once, or drawn again and again
on the whole terminal.
"""
