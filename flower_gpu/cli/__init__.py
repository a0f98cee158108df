"""The command line: ``main`` runs a command. Each command is a ``Command`` with help, options and ``run``.

Options come from tables. Shared options are in ``flower_gpu.options``, and the options of ``launch`` and
``simulate`` are in the ``options.py`` of their packages. ``arguments`` adds them to the parsers. No command
imports torch or flwr before it has checked its options.
"""
