"""What this host's GPUs, leases and runs do, for Prometheus."""
