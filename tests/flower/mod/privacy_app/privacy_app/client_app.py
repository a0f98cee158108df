import os

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod, arrays_size_mod, fixedclipping_mod, message_size_mod

from flower_gpu import gpu_mod

# Nearly no noise: it is to be seen that all of them have had their part.
local_dp = LocalDpMod(clipping_norm=4.0, sensitivity=1e-6, epsilon=10.0, delta=1e-5)
app = ClientApp(mods=[message_size_mod, arrays_size_mod, fixedclipping_mod, local_dp, gpu_mod(num_gpus=0.25)])


@app.train()
def train(message, context):
    arrays = {key: Array(np.asarray(value.numpy() + 10)) for key, value in message.content["arrays"].items()}
    metrics = MetricRecord({"num-examples": 1, "is-worker": int("FLOWER_GPU_LEASE" in os.environ)})
    return Message(RecordDict({"arrays": ArrayRecord(arrays), "metrics": metrics}), reply_to=message)
