"""The GPUs of this host, and the rules for their use.

::

    inventory: lists the GPUs (gpus), including broken ones
        |  query_thread: a thread of its own, because a driver may hang
    drivers: the driver of this host, from a table with one line for each vendor
        |
    nvidia: reads cards, MIG devices and processes; names of variables and device files
        |
    nvml: calls NVIDIA's management library

``policy`` decides which GPUs a call may use, from the node's settings and the server's request.
``device_files`` lists the files by which processes reach GPUs. No module starts CUDA.
"""
