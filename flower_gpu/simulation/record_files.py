"""Flower's records as bytes, where in a file such bytes are, and errors of the disk that has them.

The bytes are a description in JSON, then those of the arrays as they are. Nothing is pickled. Flower's own
way to protobuf is not used, since it ends at 2 GiB and at integers of 64 bits, and copies each array twice.
"""

from __future__ import annotations

import contextlib
import errno
import json
import shutil
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from flower_gpu.errors import FlowerGPUError
from flower_gpu.flower import arrays
from flower_gpu.leases.request import format_bytes
from flower_gpu.printable import path_text
from flower_gpu.workers.transport.regions import SMALL_BYTES, Region

_MAGIC = b"fgrecs01"
_START = struct.Struct("<8sQ")  # magic, bytes of the description

_ARRAYS, _METRICS, _CONFIGS = "arrays", "metrics", "configs"
_BYTES = "bytes"  # what a config value of bytes is described by: their number, or a list of numbers

#: Bytes, or memory of an array.
Buffer = bytes | memoryview
_Take = Callable[[int], memoryview]  # returns the next bytes behind the description


def encode(records: RecordDict) -> bytes:
    """Return the records as bytes of their own: no memory of theirs is held; see :func:`encode_parts`."""
    return b"".join(encode_parts(records))


def encode_parts(records: RecordDict) -> list[Buffer]:
    """Return the bytes in parts, of which the large ones are the records' own memory.

    Raises
    ------
    TypeError
        If a list in a record was changed into something that Flower does not take.
    """
    buffers: list[Buffer] = []
    described: list[tuple[str, str, list[Any]]] = []
    for name, record in records.items():
        if isinstance(record, ArrayRecord):
            described.append((name, _ARRAYS, [_array(key, array, buffers) for key, array in record.items()]))
        elif isinstance(record, MetricRecord):
            # Made anew, so that what Flower does not take is refused here and not when it is read.
            described.append((name, _METRICS, list(MetricRecord(dict(record)).items())))
        else:
            values = ConfigRecord(dict(record)).items()
            described.append((name, _CONFIGS, [(key, _config(value, buffers)) for key, value in values]))
    head = json.dumps(described).encode()
    return [_START.pack(_MAGIC, len(head)), head, *buffers]


def decode(data: bytes) -> RecordDict:
    """Return new records; arrays of some size read ``data`` where it lies.

    Raises
    ------
    ValueError
        If these are not bytes of :func:`encode`.
    """
    magic, size = _START.unpack_from(data)
    if magic != _MAGIC:
        raise ValueError("no records of Flower in the form of this version")
    view, offset = memoryview(data), _START.size + size
    description = json.loads(data[_START.size : offset])

    def take(size: int) -> memoryview:
        nonlocal offset
        found = view[offset : offset + size]
        if len(found) != size:
            raise ValueError("records of Flower that end too early")
        offset += size
        return found

    records = RecordDict()
    for name, kind, items in description:
        if kind == _ARRAYS:
            record = ArrayRecord()
            for key, *fields in items:
                record[key] = _array_of(take, *fields)
            records[name] = record
        elif kind == _METRICS:
            records[name] = MetricRecord(dict(items), keep_input=False)
        else:
            records[name] = ConfigRecord({key: _config_of(value, take) for key, value in items})
    return records


def _array(key: str, array: Array, buffers: list[Buffer]) -> tuple[Any, ...]:
    # One that came from a worker would first make bytes of its memory for `data`.
    region = array.__dict__.get("_region")
    data = memoryview(array.data if region is None else region.memory)
    buffers.append(data)
    return key, array.dtype, [int(length) for length in array.shape], array.stype, data.nbytes


def _array_of(take: _Take, dtype: str, shape: Sequence[int], stype: str, size: int) -> Array:
    view = take(size)
    if size < SMALL_BYTES:
        return Array(dtype=dtype, shape=tuple(shape), stype=stype, data=bytes(view))
    # Not Flower's own: its bytes, sent for a second time, would pass for a model that all calls share.
    return arrays._rebuild(dtype, tuple(shape), stype, Region(view))


def _config(value: Any, buffers: list[Buffer]) -> Any:
    if isinstance(value, bytes):
        buffers.append(value)
        return {_BYTES: len(value)}
    if isinstance(value, list) and value and isinstance(value[0], bytes):
        buffers.extend(value)
        return {_BYTES: [len(part) for part in value]}
    return value


def _config_of(value: Any, take: _Take) -> Any:
    if not isinstance(value, dict):
        return value
    sizes = value[_BYTES]
    if isinstance(sizes, list):
        return [bytes(take(size)) for size in sizes]
    return bytes(take(sizes))


@dataclass(frozen=True)
class Place:
    """Where in a file, which never changes, the bytes of a state or a model are."""

    path: Path
    offset_bytes: int
    size_bytes: int
    checksum: int  # CRC-32

    def read(self) -> bytes:
        """Return the bytes; raises an OSError, or a ValueError if they are not what was written."""
        with self.path.open("rb") as file:
            file.seek(self.offset_bytes)
            data = file.read(self.size_bytes)
        if len(data) != self.size_bytes or zlib.crc32(data) != self.checksum:
            raise ValueError(f"{self.size_bytes} bytes from {self.offset_bytes} on are not what was written")
        return data


def disk_error(error: OSError, folder: Path, size_bytes: int, next_step: str) -> FlowerGPUError:
    """Return the error for what could not be written into a folder."""
    where = path_text(folder)
    needed = format_bytes(size_bytes)
    if error.errno == errno.EDQUOT:  # what is free on the disk says nothing
        return FlowerGPUError(
            f"no quota is left: {where} needs {needed} more ({error.strerror}). {next_step}"
        )
    if error.errno != errno.ENOSPC:
        return FlowerGPUError(f"cannot write {needed} into {where}: {error.strerror}. {next_step}")
    free = ""
    with contextlib.suppress(OSError):
        nearest = next(path for path in (folder, *folder.parents) if path.exists())
        free = f", and {format_bytes(shutil.disk_usage(nearest).free)} are free"
    return FlowerGPUError(
        f"the disk is full: {where} has no room for {needed} more{free} ({error.strerror}). {next_step}"
    )
