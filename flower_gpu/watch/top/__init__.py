"""``flower-gpu top``: the GPUs of this host now, with workers and waiting requests.

A snapshot combines the ledger, the driver and the histories of runs. ``--json`` prints it as it is. The view
renders it as lines, which are printed once or drawn repeatedly on the whole terminal.
"""
