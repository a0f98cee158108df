"""``flower-gpu top``: what runs on this host's GPUs now.

The watcher looks at ledger, driver and the histories of runs, and puts rows together to a snapshot.
``--json`` prints the snapshot; the view draws it with rich: once, or live on the whole terminal. The live
view keeps what it has seen in a past, and a wide terminal has graphs of that.
"""
