"""``flower-gpu top``: what runs on this host's GPUs now."""
