"""The checks of ``flower-gpu doctor``: functions that yield what they have found, by group in a module each.

A finding is a level, a text, and mostly what to do. ``findings.examine`` runs the checks one after the other,
and the command prints what they yield as it comes. None of them imports torch or flwr, or starts a GPU, but
for the last: a small sum in a process of its own, under a lease.
"""
