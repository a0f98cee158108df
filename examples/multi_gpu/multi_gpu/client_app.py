"""The client: a training on several GPUs. Torch is imported by its workers only."""

from flwr.clientapp import ClientApp

from flower_gpu import distributed, gpu_mod

app = ClientApp(mods=[gpu_mod(resources=lambda context: {"num_gpus": context.run_config["num-gpus"]})])


@app.train()
def train(message, context):
    """Train in one process for each GPU; with one GPU in this one."""
    return distributed("multi_gpu.training:train")(message, context)
