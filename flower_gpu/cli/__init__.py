"""The command line: ``main`` finds the command, each command is one file with HELP, add_arguments and run.

Options that several commands share come from the table in ``flower_gpu.options``. ``launch`` has its options
in ``launch/options.py``, and ``main`` calls it. No command imports torch or flwr before it has checked its
options.
"""
