"""The client. Flower's mods run in the client's own process, and the training runs in a worker."""

from flwr.client.mod import fixedclipping_mod, secaggplus_mod
from flwr.clientapp import ClientApp

from flower_gpu import gpu_mod


def client_fn(context):
    from dp_secagg.task import Client  # imports torch, so only the worker may import it

    return Client({**context.run_config, **context.node_config}).to_client()


# The mods are listed from the outermost to the innermost. A reply passes them in reverse order: the update is
# trained in a worker, then clipped, then masked.
app = ClientApp(client_fn, mods=[secaggplus_mod, fixedclipping_mod, gpu_mod])
