"""The thread counts of a worker's native libraries. :mod:`flower_gpu.workers.threads` sets them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flower_gpu.calls.grants.grant import Grant, Terms
from flower_gpu.leases.lease import Lease
from flower_gpu.workers import threads


class ThreadCounts(Grant):
    """As many threads as the call has cores."""

    def environment(self, terms: Terms) -> dict[str, str]:
        """Set the number of threads, which this process may have changed for its own libraries."""
        worker, takes_over = terms.settings.worker, terms.takes_over
        # A number of cores that a call requests overrides the thread settings of this process.
        takes_over = takes_over and terms.settings.host.num_cpus is None
        takes_over = terms.method.copies_caller or takes_over
        count = threads.of_worker(worker.threads, worker.env, takes_over=takes_over)
        return threads.environment(count, worker.env)

    def describe(self, terms: Terms, env: Mapping[str, str]) -> dict[str, Any]:
        """Return the number of threads."""
        return {"threads": threads.openmp_threads(env)}

    def in_worker(self, lease: Lease | None) -> None:
        """Set the counts of the libraries that this worker has loaded already."""
        threads.apply()
