"""A Flower app on disk (``app``, ``app_imports``), and the run of one.

A run has a folder (``folder`` has all names of files in it), an entry among those that go on, and events of
its begin and end and samples of the GPUs (``recording``), and a list of failed messages (``failures``).
Nothing here imports flwr.
"""
