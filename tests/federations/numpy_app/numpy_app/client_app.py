from flwr.client import ClientApp

from flower_gpu import gpu_client


def client_fn(context):
    partition, dying = context.node_config["partition-id"], context.run_config["dying-client"]
    return gpu_client("numpy_app.task:RegressionClient", partition, dying).to_client()


app = ClientApp(client_fn)
