"""What belongs to one call: its options, its lease, and what runs around its task in the worker."""
