"""What this host's GPUs, leases and runs do, for Prometheus.

Prometheus asks the server, which asks the collector: it looks at the host (GPUs and ledger) and at the
histories of all registered runs, and makes samples for the metrics of the table. Counters are one tally that
all histories share.
"""
