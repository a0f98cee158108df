"""A GPU client without cuBLAS and cuDNN, for the stand-in for CUDA. It takes leases with gpu_mod."""

from flwr.app import ArrayRecord, Context, Message
from flwr.clientapp import ClientApp

from bench_app.replies import reply_to
from flower_gpu import gpu_mod

app = ClientApp(mods=[gpu_mod])


@app.train()
def train(message: Message, context: Context) -> Message:
    import torch

    trained = []
    for weights in message.content["arrays"].to_numpy_ndarrays():
        weight = torch.nn.Parameter(torch.from_numpy(weights.copy()).cuda())
        optimizer = torch.optim.SGD([weight], 0.1)
        for _ in range(10):
            optimizer.zero_grad()
            (torch.randn(len(weights)).cuda() * weight).sum().backward()
            optimizer.step()
        trained.append(weight.detach().cpu().numpy())
    return reply_to(message, context, ArrayRecord(trained), 1)
