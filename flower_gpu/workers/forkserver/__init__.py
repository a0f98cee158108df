"""The fork server: a process with libraries that forks a worker for each caller that asks for one.

There is one for each user and environment of a host; one with preloaded data is derived from it.
"""
