"""An ordinary client: it multiplies numbers on the GPU, and follows a gradient."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from flower_gpu import gpu_mod

app = ClientApp(mods=[gpu_mod])


@app.train()
def train(message: Message, context: Context) -> Message:
    import torch

    [weights] = message.content["arrays"].to_numpy_ndarrays()
    weight = torch.nn.Parameter(torch.from_numpy(weights.copy()).cuda())
    optimizer = torch.optim.SGD([weight], 0.1)
    for _ in range(10):
        optimizer.zero_grad()
        (torch.randn(len(weights)).cuda() * weight).sum().backward()
        optimizer.step()
    arrays = ArrayRecord([weight.detach().cpu().numpy()])
    metrics = MetricRecord({"num-examples": 1})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)
