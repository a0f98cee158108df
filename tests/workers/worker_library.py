"""A library that only workers import, as torch is for a client that holds weights."""


class LibraryError(Exception):
    pass


class Thing:
    pass
