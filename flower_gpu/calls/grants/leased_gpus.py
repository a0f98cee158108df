"""The GPUs of a lease: the worker sees these and no others, as ``cuda:0`` and so on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from flower_gpu import frameworks
from flower_gpu.calls.grants.grant import Grant, Terms
from flower_gpu.gpu import drivers
from flower_gpu.leases.lease import VARIABLE, Lease
from flower_gpu.workers import own_process


class LeasedGPUs(Grant):
    """The visible GPUs of a worker."""

    def of_lease(self, lease: Lease | None, environ: Mapping[str, str]) -> dict[str, str]:
        """Show only the GPUs of the lease."""
        visible = drivers.of_host().visible_variable
        if lease is None:
            return {visible: "", VARIABLE: ""}
        return {
            **drivers.of_host().variables,
            visible: ",".join(share.uuid for share in lease.shares),
            VARIABLE: lease.to_text(),
        }

    def describe(self, terms: Terms, env: Mapping[str, str]) -> dict[str, Any]:
        """Return the id of the lease."""
        if terms.lease is None or terms.is_shared:
            return {}
        return {"lease" if terms.lease.shares else "cores_lease": terms.lease.id}

    @contextmanager
    def in_worker(self, lease: Lease | None) -> Iterator[None]:
        """Add the numbers of this worker's GPUs to an error about an invalid number.

        An app that chooses ``cuda:1`` for its second client works without leases on a host with two GPUs. In
        the worker of that client, CUDA says "invalid device ordinal", and nothing about the reason.
        """
        try:
            yield
        except Exception as error:
            if lease is not None and not own_process.is_inside():
                # An app's own exception may have no text.
                with suppress(Exception):
                    _explain(error, len(lease.shares))
            raise


def _explain(error: Exception, count: int) -> None:
    first, *more = str(error).splitlines() or [""]
    if frameworks.says_no_such_device(first):
        numbers = "the GPU of its lease, as cuda:0" if count == 1 else _numbers(count)
        explained = f"{first} (a worker sees only {numbers}; write torch.device('cuda'))"
        error.args = ("\n".join([explained, *more]),)


def _numbers(count: int) -> str:
    return f"the {count} GPUs of its lease, as cuda:0 to cuda:{count - 1}"
