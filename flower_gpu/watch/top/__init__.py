"""``flower-gpu top``: the GPUs of this host now, with workers and waiting requests.

The watcher looks at ledger, driver and the histories of runs, and puts rows together to a snapshot.
``--json`` prints the snapshot; the view makes lines of it, which are printed once, or drawn again and again
on the whole terminal.
"""
