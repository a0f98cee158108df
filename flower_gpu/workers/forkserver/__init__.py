"""Fork servers: processes with libraries that fork a worker for each call.

The host's (client, server) is shared by all callers of a user and environment. A run's own (run_server,
run_program, line) has the app's libraries and preloaded data.
"""
