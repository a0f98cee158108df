"""The client. With `context=context`, GPUClient obeys the node config and the run config."""

from flwr.client import ClientApp

from flower_gpu import GPUClient


def client_fn(context):
    node = context.node_config
    arguments = {
        "name": node.get("name", f"node {node.get('partition-id')}"),
        "policy": node.get("gpu", "offer"),
        "use_gpu": context.run_config["use-gpu"],
    }
    client = GPUClient("device_policy.task:train", kwargs=arguments, gpu_memory="1GiB", context=context)
    return client.to_client()


app = ClientApp(client_fn)
