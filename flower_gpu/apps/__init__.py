"""A Flower app on disk (``app``, ``app_imports``, ``config_values``), and the run of one.

A run has a folder (``folder`` has all names of files in it), an entry in the registry while it lives
(``registry``), events of its begin and end (``recording``), samples of the GPUs (``sampler``), and a list of
failed messages (``failures``). Nothing here imports flwr.
"""
