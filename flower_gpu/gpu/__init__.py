"""The GPUs of this host, and the rules for their use.

``nvml`` calls NVIDIA's management library, in a thread of its own (``nvml_thread``) because a driver may
hang. ``inventory`` lists the GPUs (``gpus``), including broken GPUs and MIG devices. ``policy`` decides which
GPUs a call may use, from the node's settings and the server's request. ``device_files`` lists the files by
which processes reach GPUs. No module starts CUDA.
"""
