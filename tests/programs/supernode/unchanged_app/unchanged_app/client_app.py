"""The client trains on its part of the data, and on a GPU if there is one."""

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from unchanged_app import task

app = ClientApp()


@app.train()
def train(msg: Message, context: Context):
    partition = context.node_config["partition-id"]
    task.print_report(partition)
    task.pause(context.run_config["pause-folder"], msg.content["config"]["server-round"], partition)
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    model = task.Net()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    features, labels = task.load_data(partition, context.run_config["data-folder"])
    loss = task.train(model.to(device), features, labels, context.run_config["learning-rate"], device)
    content = {
        "arrays": ArrayRecord(model.state_dict()),
        "metrics": MetricRecord({"train_loss": loss, "num-examples": len(labels)}),
    }
    return Message(RecordDict(content), reply_to=msg)
