"""The command line: ``main`` finds the command; each is a ``Command`` with its help, its options and ``run``.

Options come from tables: those that several commands share from ``flower_gpu.options``, those of ``launch``
and ``simulate`` from the ``options.py`` of their rooms; ``arguments`` fills the parsers. No command imports
torch or flwr before it has checked its options.
"""
