"""The client. It names the function that its workers run, and never imports TensorFlow itself."""

from flwr.client import ClientApp

from flower_gpu import GPUClient


def client_fn(context):
    settings = {**context.run_config, **context.node_config}  # partition-id and num-partitions too
    return GPUClient(
        "keras_digits.task:train",
        kwargs={"settings": settings},
        preload="keras_digits.task:load_data",  # runs once, in the fork server of all workers
        context=context,
    ).to_client()


app = ClientApp(client_fn)
