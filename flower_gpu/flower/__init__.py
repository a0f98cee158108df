"""For Flower's users: clients, a mod, strategies, evaluation; and our versions of Flower's own commands.

A message comes in by ``client`` (NumPyClient API), by ``mod`` (any ClientApp) or by ``clientapp`` (our
``flwr-clientapp``; drawing in ``commands``). All of them hand it to ``message_call`` or straight to the room
``calls``. ``results`` checks the reply in the worker. ``many`` registers functions that simulations call with
several messages. On the server ``strategy`` runs rounds (``rounds``), sums replies (``averaging``) and
evaluates (``evaluate``). In a simulation Flower's own strategies do the same (``streaming``), and can go on
later (``strategy_state``). ``recording/`` writes all of that into the trace.

Only this room, ``simulation`` and ``launch`` import flwr.
"""
