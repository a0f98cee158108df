"""The client. It names the function that its workers run, and never imports torch itself."""

from flwr.client import ClientApp

from flower_gpu import GPUClient


def client_fn(context):
    settings = {**context.run_config, **context.node_config}  # partition-id and num-partitions too
    client = GPUClient("quickstart.task:train", kwargs={"settings": settings}, context=context)
    return client.to_client()


app = ClientApp(client_fn)
