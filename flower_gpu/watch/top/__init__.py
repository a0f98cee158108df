"""``flower-gpu top``: the GPUs of this host now, with workers and waiting requests.

A snapshot is made of ledger, driver and the histories of runs. ``--json`` prints it; the view makes lines of
it, which are printed once, or drawn again and again on the whole terminal.
"""
