"""What travels beside a pickle: large buffers, each a region of a memory file.

Of numpy's arrays the bytes travel so. Only functions import numpy: many tasks do without.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pickle import PickleBuffer
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

import cloudpickle

from flower_gpu.errors import WorkerError
from flower_gpu.workers.memory_files import Map, SharedFile

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: Buffers below this go into the pickle.
SMALL_BYTES = 4096

# Where a region is: in the same file, in the request (of a reply), in the model that workers share.
HERE, IN_REQUEST, IN_SHARED = 0, 1, 2
# What it is: an array; one of pickle's own out-of-band buffers, which come in order; immutable.
ARRAY, BUFFER, IMMUTABLE = 0, 1, 2

_MAX_DEPTH = 20


class Region:
    """Bytes that arrived beside a pickle.

    ``memory``: the bytes: writable for arrays, read-only for what was immutable.
    ``writable``: the same bytes once more, for :meth:`take`.
    """

    def __init__(self, memory: memoryview, writable: memoryview | None = None) -> None:
        self.memory = memory
        self._writable = [] if writable is None else [writable]

    def take(self) -> memoryview | None:
        """Return the bytes, once and without a copy, as writable memory; None where that cannot be."""
        try:
            return self._writable.pop()  # in one step: other threads may ask as well
        except IndexError:
            return None


@dataclass
class SideBytes:
    """Bytes that go beside a pickle."""

    view: memoryview
    kind: int
    shareable: bytes | None = None
    where: int = HERE
    offset: int = 0


class Parts:
    """Collects the parts beside a pickle.

    ``roots``: what is pickled, with names for messages.
    ``request``: the worker's map of its arguments: what lies there need not be written again.
    """

    def __init__(self, roots: Sequence[tuple[str, Any]], request: Map | None = None) -> None:
        self.all: list[SideBytes] = []
        self._roots = roots
        self._request = request

    def add(
        self,
        view: memoryview,
        *,
        address: int | None = None,
        immutable: bool = False,
        shareable: bytes | None = None,
    ) -> Any:
        """Put bytes beside the pickle.

        ``immutable``: whether nobody can change them. On arrival they cannot be changed either, but taken
        once as writable memory of their own.
        ``shareable``: the same bytes, if other calls may send this very object: then it is written once.
        Returns becomes a :class:`Region` on arrival.
        """
        part = SideBytes(view, IMMUTABLE if immutable else ARRAY, shareable)
        if self._request is not None and address is not None:
            offset = self._request.offset_of(address, view.nbytes)
            if offset is not None:
                part.where, part.offset = IN_REQUEST, offset
        self.all.append(part)
        return _Handle(len(self.all) - 1)

    def take(self, buffer: pickle.PickleBuffer) -> bool:
        """Take a buffer of some other type; pickle's ``buffer_callback``."""
        view = buffer.raw()
        if view.nbytes < SMALL_BYTES:
            return True  # keep it in the pickle
        self.all.append(SideBytes(view, BUFFER))
        return False

    def path_to(self, wanted: Any) -> str | None:
        """Return where in nested lists, tuples and dicts an object is, for example ``"args[0]['w']"``."""
        for name, root in self._roots:
            path = _path_to(root, wanted, _MAX_DEPTH)
            if path is not None:
                return name + path
        return None

    def refer_to(self, shared: SharedFile) -> None:
        """Let the parts that are in this file not be written."""
        for part in self.all:
            if part.shareable is not None and (offset := shared.offset_of(part.shareable)) is not None:
                part.where, part.offset = IN_SHARED, offset

    def copy_what_would_hold_too_much(self) -> None:
        """Write again what overlaps, and everything if it would keep a request of over twice its size."""
        inside = sorted((part for part in self.all if part.where == IN_REQUEST), key=lambda part: part.offset)
        total = end = 0
        for part in inside:
            if part.offset < end:
                part.where = HERE  # two arrays then, as in any pickle
                continue
            end = part.offset + part.view.nbytes
            total += part.view.nbytes
        if self._request is not None and total < self._request.size / 2:
            for part in inside:
                part.where = HERE


class _Handle:
    def __init__(self, index: int) -> None:
        self._index = index

    def __reduce__(self) -> Any:
        return _region, (self._index,)


class _Reading(threading.local):
    """What this thread reads."""

    regions: Sequence[Region] | None = None


_reading = _Reading()


def _region(index: int) -> Region:
    """Stand, in a pickle, for a region of the file that is being read."""
    if _reading.regions is None:
        raise WorkerError(f"region {index} belongs to a memory file between worker and caller")
    return _reading.regions[index]


def _path_to(value: Any, wanted: Any, depth: int) -> str | None:
    children: Iterable[tuple[str, Any]]
    if value is wanted:
        return ""
    if depth == 0:
        return None
    if isinstance(value, list | tuple):
        children = ((f"[{number}]", child) for number, child in enumerate(value))
    elif isinstance(value, dict):
        children = ((f"[{key!r}]", child) for key, child in value.items())
    else:
        return None
    for name, child in children:
        path = _path_to(child, wanted, depth - 1)
        if path is not None:
            return name + path
    return None


#: Takes an object and where to put its bytes; returns what a ``__reduce__`` method would.
Reduce = Callable[[Any, Parts], Any]

_reducers: dict[type, Reduce] = {}


def register(kind: type, reduce: Reduce) -> None:
    """Set how objects of exactly this type travel."""
    _reducers[kind] = reduce


def dumps_by_name(value: Any, parts: Parts) -> bytes:
    """Pickle; classes and functions by name, as the standard library does."""
    return _dumps(_ByName, value, parts)


def dumps_by_value(value: Any, parts: Parts, note: Callable[[Any], None] | None = None) -> bytes:
    """Pickle; objects that the other process cannot import go by value, as with cloudpickle.

    ``note``: receives each function and each class among them, when it is pickled for the first time.
    """
    return _dumps(partial(_ByValue, note=note), value, parts)


def loads(head: bytes, regions: Sequence[Region], buffers: Iterable[memoryview]) -> Any:
    """Unpickle the bytes of one of these; WorkerError if they are no pickle."""
    before, _reading.regions = _reading.regions, regions
    try:
        return pickle.loads(head, buffers=buffers)
    except (pickle.UnpicklingError, EOFError) as error:
        raise WorkerError(f"a memory file between worker and caller cannot be read: {error}") from error
    finally:
        _reading.regions = before


# Whose classes every process can import. Messages are made of them.
_IMPORTABLE = {"flwr", "flower_gpu", "numpy"}


class _ByName(pickle.Pickler):
    def __init__(self, file: io.BytesIO, parts: Parts) -> None:
        # Before pickle's own __init__, which looks at it once.
        self.dispatch_table = _bound_to(parts, copyreg.dispatch_table)
        super().__init__(file, protocol=5, buffer_callback=parts.take)


class _ByValue(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(self, file: io.BytesIO, parts: Parts, note: Callable[[Any], None] | None) -> None:
        self._note = note
        table = {**cloudpickle.Pickler.dispatch_table, CodeType: _code_by_value}
        self.dispatch_table = _bound_to(parts, table)
        super().__init__(file, protocol=5, buffer_callback=parts.take)

    def reducer_override(self, obj: Any) -> Any:
        if self._note is not None and isinstance(obj, FunctionType | type):
            self._note(obj)
        # cloudpickle looks for each class anew.
        kind = obj if isinstance(obj, type) else type(obj)
        if str(kind.__module__).partition(".")[0] in _IMPORTABLE and "<locals>" not in kind.__qualname__:
            return NotImplemented
        return super().reducer_override(obj)


def _code_by_value(code: CodeType) -> tuple[Any, ...]:
    # cloudpickle leaves the file's name out from version 3.1.3 on: a traceback would not say where a line is.
    make, fields = cloudpickle.Pickler.dispatch_table[CodeType](code)
    return _code_in, (code.co_filename, make, fields)


def _code_in(filename: str, make: Callable[..., CodeType], fields: tuple[Any, ...]) -> CodeType:
    return make(*fields).replace(co_filename=filename)


def _bound_to(parts: Parts, others: Mapping[Any, Any]) -> Mapping[Any, Any]:
    def bind(reduce: Reduce) -> Callable[[Any], Any]:
        return lambda obj: reduce(obj, parts)

    return {**others, **{kind: bind(reduce) for kind, reduce in _all_reducers()}}


def _dumps(pickler: Callable[[io.BytesIO, Parts], Any], value: Any, parts: Parts) -> bytes:
    parts.all.clear()
    file = io.BytesIO()
    pickler(file, parts).dump(value)
    return file.getvalue()


def _all_reducers() -> Iterator[tuple[type, Reduce]]:
    if "numpy" in sys.modules:  # or there is no array, and no need to import it
        import numpy as np

        yield np.ndarray, reduce_array
    yield from _reducers.items()


_SIMPLE = "biufc"  # numpy's own pickles of dates forget byte order and read-only
_ALIGNMENT = 16  # torch's kernels crash on less, for complex128


def reduce_array(array: NDArray[Any], parts: Parts) -> Any:
    """Return the reduction of ``array``, with many bytes beside the pickle; TypeError for objects."""
    import numpy as np

    if array.dtype.hasobject:
        path = parts.path_to(array) if array.dtype.kind in "OV" else None  # "T": text of any length
        if path is not None:
            raise TypeError(
                f"{path} is an array of objects (dtype {array.dtype}, shape {array.shape}); "
                "convert it to a numeric dtype, or make it a list"
            )
        return array.__reduce_ex__(5)
    writeable = array.flags.writeable
    if not writeable and 0 in array.strides and array.size > 0:
        # np.broadcast_to: one row that looks like a million
        once = array[tuple(slice(1) if step == 0 else slice(None) for step in array.strides)]
        if once.size < array.size:
            return np.broadcast_to, (once, array.shape)
    if not (array.flags.c_contiguous or array.flags.f_contiguous):
        array = array.copy(order="C")
        array.flags.writeable = writeable
    small = array.nbytes < SMALL_BYTES
    if array.dtype.itemsize == 0 or (small and array.dtype.kind in _SIMPLE):
        return array.__reduce_ex__(5)
    order: Any = "C" if array.flags.c_contiguous else "F"
    raw = array.reshape(-1, order=order).view(np.uint8)  # dates have no buffer of their own
    where = (
        PickleBuffer(raw.data) if small else parts.add(raw.data, address=raw.__array_interface__["data"][0])
    )
    return build, (where, array.dtype, array.shape, order, writeable)


def build(
    found: Region | bytes | bytearray, dtype: Any, shape: tuple[int, ...], order: Any, writeable: bool
) -> Any:
    """Return the array with these bytes, without copying them; WorkerError if these are not that many."""
    import numpy as np

    memory = found.memory if isinstance(found, Region) else memoryview(found)
    if not writeable:
        memory = memory.toreadonly()
    count = 1
    for length in shape:
        count *= length
    if count * dtype.itemsize != memory.nbytes:
        raise WorkerError(f"{memory.nbytes} bytes arrived for an array of shape {shape} and type {dtype}")
    return aligned(np.ndarray(shape, dtype, memory, order=order))


def aligned(array: NDArray[Any]) -> NDArray[Any]:
    """Return the array itself, or a copy if it lies where torch's kernels may crash."""
    if array.__array_interface__["data"][0] % _ALIGNMENT == 0:
        return array
    copy = array.copy(order="K")
    copy.flags.writeable = array.flags.writeable
    return copy
