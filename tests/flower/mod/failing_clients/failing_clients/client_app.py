from flwr.client import ClientApp

from flower_gpu import gpu_client


def client_fn(context):
    return gpu_client("failing_clients.task:Client", context.node_config["partition-id"]).to_client()


app = ClientApp(client_fn)
