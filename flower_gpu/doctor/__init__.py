"""The checks of ``flower-gpu doctor``, a module for each group. None of them imports torch or flwr."""
