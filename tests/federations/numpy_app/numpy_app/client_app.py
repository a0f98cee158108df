from flwr.client import ClientApp

from flower_gpu import gpu_client


def client_fn(context):
    partition = context.node_config["partition-id"]
    limit_s = 5 if partition == 3 else None  # it never returns; the fork server is there by then
    return gpu_client("numpy_app.task:RegressionClient", partition, timeout_s=limit_s).to_client()


app = ClientApp(client_fn)
