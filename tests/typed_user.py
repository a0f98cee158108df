"""A user's file for type checkers, which must report exactly the lines that end in `# type: ignore`."""

from typing import Any

from flwr.app import Context, Message
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

import flower_gpu
from flower_gpu import (
    CallOptions,
    GPUClient,
    SimulationOptions,
    distributed,
    evaluate_many,
    gpu_client,
    gpu_evaluate,
    gpu_mod,
    message_seed,
    run_in_worker,
    simulate,
    train_many,
)


class Client(NumPyClient):
    def __init__(self, partition: int) -> None: ...


def train(weights: Any, config: Any) -> Any: ...


@distributed(num_gpus=2, timeout_s=60)
def train_large(weights: Any, config: Any) -> Any: ...


def client_fn(context: Context) -> Any:
    GPUClient(train, num_gpus=0.5, gpu="force", context=context)
    GPUClient(train, num_gpu=0.5)  # type: ignore
    GPUClient(train, gpu="forced")  # type: ignore
    GPUClient(train, start_method="forkserver", on_oom="give up")  # type: ignore
    gpu_client(Client, context.node_config["partition-id"], partition=3, num_gpus=0.5, gpu="never")
    gpu_client(Client, partition=3, gpu="always")  # type: ignore
    gpu_client(Client, 3, on_oom="crash")  # type: ignore
    return gpu_client(Client, 3, start_method="thread").to_client()  # type: ignore


apps = (ServerApp(), ClientApp(client_fn, mods=[gpu_mod]))
ClientApp(mods=[gpu_mod(gpu_memory="2GiB", on_oom="cpu", resources={"0": {"num_gpus": 1}})])
ClientApp(mods=[gpu_mod(on_oom="again")])  # type: ignore
gpu_mod(timeouts_s=5)  # type: ignore
gpu_mod(timeout_s="5")  # type: ignore

result = simulate("app", 100, seed=1, num_gpus=0.5, gpu="require", on_oom="fail", start_method="auto")
simulate(apps, 100, order="sent", gpu_ids="0,1", num_cpus=0.5, preload="task:load", env={"A": "1"})
simulate("app", 100, num_gpu=0.5)  # type: ignore
simulate("app", 100, num_gpus="half")  # type: ignore
simulate("app", 100, on_oom="retyr")  # type: ignore
simulate("app", 100, gpu="offered")  # type: ignore
simulate("app", 100, start_method="forked")  # type: ignore
simulate("app", 100, order="longst")  # type: ignore
simulate("app", 100, max_worker=3)  # type: ignore

options: CallOptions = {"num_gpus": 0.25, "lease_timeout_s": 60}
flower_gpu.simulate("app", 100, **options)
gpu_evaluate(train, **options)
run_options: SimulationOptions = {"rounds": 3, "num_gpus": 0.25, "client_output": "file"}
simulate("app", 100, **run_options)
gpu_evaluate(train, kwargs={"data": 1}, on_oom="cpu")
gpu_evaluate(train, on_oom="gpu")  # type: ignore
wrong: CallOptions = {"gpu": "on"}  # type: ignore

run_in_worker(train, [], {}, seed=3, num_gpus=0.5, start_method="spawn")
run_in_worker("task:train", start_method="spwan")  # type: ignore
run_in_worker("task:train", gpu="no", seed=3)  # type: ignore
distributed(train, timeout_s="long")  # type: ignore

many = ClientApp()


@train_many(many, max_messages=16)
def fit_many(messages: list[Message], contexts: list[Context]) -> list[Message]:
    seeds: list[int] = [message_seed(message) for message in messages]
    return [Message(message.content, reply_to=message) for message, _ in zip(messages, seeds, strict=True)]


fit_many([], [])
fit_many([])  # type: ignore


@evaluate_many(many, "other", mods=[gpu_mod])
def evaluate_other(messages: list[Message], contexts: list[Context]) -> list[Message]:
    return fit_many(messages, contexts)


@train_many(many, "one")  # type: ignore
def fit_one(message: Message, context: Context) -> Message:
    return Message(message.content, reply_to=message)


train_many(many, most=3)  # type: ignore
