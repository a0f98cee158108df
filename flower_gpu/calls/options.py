"""The options that everything has which runs calls in workers, and what becomes of them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypedDict

from flower_gpu.config import WorkerSettings
from flower_gpu.gpu.settings import GPUSettings
from flower_gpu.isolation.preload import checked


class CallOptions(TypedDict, total=False):
    """Options of ``gpu_mod``, ``GPUClient``, ``gpu_client``, ``gpu_evaluate`` and ``run_in_worker``.

    What is left out is taken from the environment (docs/reference/environment.md), else the default.

    Parameters
    ----------
    start_method : str
        One of :data:`flower_gpu.config.START_METHODS`; default ``"auto"``. ``"in-process"`` runs everything
        in the calling process, for debugging with breakpoints.
    timeout_s : float
        Seconds a call may take, counted from its lease; then its worker and the worker's children are ended.
        Default: no limit.
    env : mapping of str to str
        Environment variables of the worker.
    name : str
        The client's name in messages and in the trace.
    preload : str, tuple or list
        What all workers need and takes long to load: ``"package.module:function"``, a pair of that and its
        keyword arguments, or a list of these. The function is called once where workers are forked from, on
        the CPU; what it leaves in the globals of its module is there in every worker, without a copy.
    num_gpus : float
        How many GPUs a call gets: a share of one (0.25: four calls fit), or a whole number.
    gpu_memory : int or str
        Memory of one GPU that a call gets, CUDA's context included: ``"2GiB"``, or bytes. Default, if
        ``num_gpus`` is not given either: what earlier calls of the task were seen to need.
    lease_timeout_s : float
        Seconds a call may wait for that; default 1800.
    on_oom : str
        What follows when a call runs out of GPU memory: ``"retry"`` (default) with more of a GPU, ``"cpu"``
        if that fails too, or ``"fail"``.
    gpu : str
        This node's device policy where neither the node config nor the environment has one: ``"never"``,
        ``"offer"`` (default), ``"force"`` or ``"require"``.
    gpu_num : int or str
        This node's GPUs likewise: a number, a UUID, or several of them in one text, ``"0,1"``.
    context : flwr.app.Context
        What ``client_fn`` or ``server_fn`` gets: its node config may hold ``gpu``, ``gpu-num``,
        ``num-gpus`` and ``gpu-memory``, its run config ``use-gpu``.
    """

    start_method: str | None
    timeout_s: float | None
    env: Mapping[str, str] | None
    name: str | None
    preload: Any
    num_gpus: float | None
    gpu_memory: int | str | None
    lease_timeout_s: float | None
    on_oom: str | None
    gpu: str | None
    gpu_num: int | str | None
    context: Any


_OF_WORKER = ("start_method", "timeout_s", "env", "name")
_OF_GPU = ("gpu", "gpu_num", "num_gpus", "gpu_memory", "lease_timeout_s", "on_oom")


@dataclass(frozen=True)
class CallSettings:
    """How calls are run.

    Parameters
    ----------
    worker : WorkerSettings
        Of their processes.
    gpu : GPUSettings
        Of what they want of the host's GPUs.
    """

    worker: WorkerSettings
    gpu: GPUSettings

    @classmethod
    def resolve(cls, options: Mapping[str, Any], *, name: str | None = None) -> CallSettings:
        """Check options and fill what is missing.

        Parameters
        ----------
        options : mapping
            As in :class:`CallOptions`.
        name : str, optional
            Name of the client where neither they nor the environment have one.

        Raises
        ------
        TypeError
            If there is no such option, or a value has the wrong type.
        ConfigError
            If a value cannot be used.
        """
        known = CallOptions.__annotations__
        if unknown := [option for option in options if option not in known]:
            raise TypeError(f"no option {unknown[0]!r}; there are {', '.join(known)}")
        context = options.get("context")
        if context is not None and not (hasattr(context, "node_config") and hasattr(context, "run_config")):
            raise TypeError(f"context must be Flower's Context, not {type(context).__name__}")
        worker = WorkerSettings.resolve(
            **{option: options[option] for option in _OF_WORKER if option in options},
            preload=checked(options.get("preload")),
            default_name=name,
        )
        return cls(
            worker,
            GPUSettings.resolve(
                **{option: options[option] for option in _OF_GPU if option in options},
                node_config=dict(context.node_config) if context is not None else {},
                run_config=dict(context.run_config) if context is not None else {},
                environ={**os.environ, **worker.env},
            ),
        )

    def named(self, name: str) -> CallSettings:
        """Return the same for another client."""
        return replace(self, worker=replace(self.worker, name=name))


def split(arguments: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Take our options out of keyword arguments that also hold a user's own.

    Returns
    -------
    tuple of dict
        The options, and the rest.
    """
    known = CallOptions.__annotations__
    return (
        {name: value for name, value in arguments.items() if name in known},
        {name: value for name, value in arguments.items() if name not in known},
    )
