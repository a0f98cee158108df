"""For Flower's users: clients, a mod, and handlers of several messages.

A message comes in by ``client`` (NumPyClient API), by ``mod`` (any ClientApp) or by ``programs.clientapp``
(our ``flwr-clientapp``). All of them hand it to ``message_call`` or straight to the room ``calls``.
``results`` checks the reply in the worker. ``many`` registers functions that simulations call with several
messages.

Only this room, ``strategies``, ``programs``, ``simulation`` and ``launch`` import flwr.
"""
