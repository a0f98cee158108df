"""An ordinary small client: scikit-learn's digits, a partition by flwr-datasets, a linear model."""

import torch
from datasets import Dataset
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr_datasets.partitioner import IidPartitioner
from sklearn.datasets import load_digits

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    images, labels = load_digits(return_X_y=True)
    partitioner = IidPartitioner(num_partitions=context.node_config["num-partitions"])
    partitioner.dataset = Dataset.from_dict({"index": range(len(labels))})
    index = partitioner.load_partition(context.node_config["partition-id"])["index"]
    x = torch.tensor(images[index] / 16, dtype=torch.float32)
    y = torch.tensor(labels[index])
    weight, bias = (
        torch.tensor(array.numpy()).requires_grad_() for array in message.content["arrays"].values()
    )
    optimizer = torch.optim.SGD([weight, bias], lr=0.5)
    for _ in range(20):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(x @ weight + bias, y)
        loss.backward()
        optimizer.step()
    arrays = ArrayRecord([weight.detach().numpy(), bias.detach().numpy()])
    metrics = MetricRecord({"num-examples": len(index), "loss": float(loss)})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)
