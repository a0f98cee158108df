"""The client: Flower's mods in the client's own process, training in a worker."""

from flwr.client.mod import fixedclipping_mod, secaggplus_mod
from flwr.clientapp import ClientApp

from flower_gpu import gpu_mod


def client_fn(context):
    from dp_secagg.task import Client  # torch is imported by the worker only

    return Client({**context.run_config, **context.node_config}).to_client()


# From outside to inside; a reply comes back the other way: trained in a worker, then clipped, then masked.
app = ClientApp(client_fn, mods=[secaggplus_mod, fixedclipping_mod, gpu_mod])
