"""Which GPUs this host has, and which of them a call may use.

``nvml`` asks NVIDIA's library, in a thread of its own (``nvml_thread``): a driver may hang. ``inventory``
makes a list of it (``gpus``), broken GPUs and MIG devices included, and knows ``CUDA_VISIBLE_DEVICES``.
``guard`` keeps workers from others' device files, of all that there are (``device_files``). ``policy``
decides what a node allows against what the server requests. ``driver_cap`` has the driver hold workers to
their leases. Nothing here starts CUDA.
"""
