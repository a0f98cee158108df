from flwr.client import ClientApp

from flower_gpu import gpu_client


def client_fn(context):
    return gpu_client("numpy_app.task:RegressionClient", context.node_config["partition-id"]).to_client()


app = ClientApp(client_fn)
