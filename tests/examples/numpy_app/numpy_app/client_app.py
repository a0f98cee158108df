from flwr.client import ClientApp

from flower_gpu import gpu_client


def client_fn(context):
    partition = context.node_config["partition-id"]
    # This client never returns. The fork server has started by then.
    limit_s = 5 if partition == 3 else None
    return gpu_client("numpy_app.task:RegressionClient", partition, timeout_s=limit_s).to_client()


app = ClientApp(client_fn)
