"""A library that only workers import, as clients that only pass weights leave torch to workers."""


class LibraryError(Exception):
    pass


class Thing:
    pass
