"""The client. It trains on several GPUs. Only its workers import torch."""

from flwr.clientapp import ClientApp

from flower_gpu import distributed, gpu_mod

app = ClientApp(mods=[gpu_mod(resources=lambda context: {"num_gpus": context.run_config["num-gpus"]})])


@app.train()
def train(message, context):
    """Train in one process for each GPU, or in this process if there is only one GPU."""
    return distributed("multi_gpu.training:train")(message, context)
