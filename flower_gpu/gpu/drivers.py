"""The drivers of GPUs: one file for each vendor, and a line in :data:`DRIVERS`.

The rest of the package reads GPUs through :mod:`.inventory`, and drivers through this module. The exception
is MPS, which only NVIDIA has. A driver has the names of its variables and device files, and a
:class:`DriverSession` that reads its GPUs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Final, Protocol

from flower_gpu.gpu.gpus import GPU, Limits
from flower_gpu.gpu.nvidia import NVIDIA


class DriverSession(Protocol):
    """The management library of a driver, started in this process.

    All methods except :meth:`close` may raise QueryError. Only one thread at a time may use a session. A fork
    must not use it.
    """

    driver_version: str | None  # as the vendor's tools show it, or None if unknown
    cuda_version: tuple[int, int] | None  # the newest CUDA that the driver supports, or None if unknown
    query: str  # description of the last query, for the message about a driver that hangs

    def gpus(self, processes: bool) -> list[GPU]:
        """Return all GPUs of the host in the order of their indices, including broken ones.

        ``processes``: also list the processes on each GPU.
        """

    def gpus_with(self, uuids: Sequence[str]) -> tuple[GPU, ...]:
        """Return these GPUs with their memory and processes, without opening other GPUs.

        Broken GPUs are omitted.
        """

    def temperatures(self) -> dict[str, int]:
        """Return the temperatures of the GPUs found by :meth:`gpus` in degrees Celsius, by UUID."""

    def limits(self, group: str, uuids: Iterable[str]) -> dict[str, Limits]:
        """Return the memory limits of a control group by UUID. GPUs without such limits are left out."""

    def set_limits(self, group: str, limits: Mapping[str, int | None]) -> None:
        """Set the memory limits of a control group, in bytes by UUID. None removes a limit."""

    def close(self) -> None:
        """Shut the library down, which closes the device files. Does not raise."""


class Driver(Protocol):
    """The driver of one vendor's GPUs."""

    name: str  # name of the vendor, for messages
    visible_variable: str  # variable that selects the visible GPUs, see :meth:`.Inventory.visible`
    variables: Mapping[str, str]  # further variables of each worker with a GPU
    absent: str  # beginning of the error that :meth:`start` raises if this driver is not installed
    no_gpu: str  # problem of a host on which the driver runs, but shows no GPU
    device_prefix: str  # start of the names of its files and folders in ``/dev``
    pci_vendor: str  # number of the vendor in PCI's table of identifiers, such as ``0x10de``
    shared_files: tuple[str, ...]  # device files that a process needs in addition to the files of its GPUs

    def is_present(self) -> bool:
        """Return True if parts of the driver are present."""

    def start(self) -> DriverSession:
        """Start the management library. Raises QueryError with the reason and a way out."""

    def why_late(self, query: str, waited_s: float) -> str:
        """Return the problem of a library that has not answered for ``waited_s`` seconds."""

    def create_files(self) -> None:
        """Create device files that the driver otherwise creates at the first use of a GPU."""


#: The drivers of all vendors. A host uses the first one that is present.
DRIVERS: Final[tuple[Driver, ...]] = (NVIDIA(),)


@cache
def of_host() -> Driver:
    """Return the driver of this host's GPUs.

    If no driver is present, return the first one, whose error says so.
    """
    return next((driver for driver in DRIVERS if driver.is_present()), DRIVERS[0])


def hides_all(environ: Mapping[str, str]) -> bool:
    """Return True if this environment hides all GPUs from a process, as for a worker without a lease."""
    return environ.get(of_host().visible_variable) == ""
