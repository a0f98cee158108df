"""Large buffers next to a pickle, each of which is a region of a memory file.

The bytes of numpy arrays are sent in this way. numpy is imported within functions only, because many tasks do
not need it.
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

# Place of a region: the same file, the request (in a reply), or the model that workers share.
IN_THIS_FILE, IN_REQUEST, IN_SHARED = 0, 1, 2
# Kind of a region: an array, one of pickle's own out-of-band buffers (in their order), or immutable bytes.
ARRAY, BUFFER, IMMUTABLE = 0, 1, 2

_MAX_DEPTH = 20


class Region:
    """Bytes that arrived next to a pickle.

    ``memory``: the bytes, writable for arrays and read-only for immutable objects.
    ``writable``: a second, writable view of the same bytes for :meth:`take`.
    """

    def __init__(self, memory: memoryview, writable: memoryview | None = None) -> None:
        self.memory = memory
        self._writable = [] if writable is None else [writable]

    def take(self) -> memoryview | None:
        """Return the bytes as writable memory, once and without a copy; None if that is not possible."""
        try:
            return self._writable.pop()  # pop is atomic, so only one thread can get the memory
        except IndexError:
            return None


@dataclass
class SideBytes:
    """Bytes to be written next to a pickle."""

    view: memoryview
    kind: int
    shareable: bytes | None = None
    file_kind: int = IN_THIS_FILE
    offset: int = 0


class Parts:
    """The parts to be written next to a pickle.

    ``roots``: the pickled objects, with names for errors.
    ``request``: the worker's map of its arguments. Bytes that lie there need not be written again.
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
        """Put bytes next to the pickle, and return an object that becomes a :class:`Region` on arrival.

        ``immutable``: True if the bytes cannot be changed. Their region is read-only, but its memory can be
        taken once as writable memory (:meth:`Region.take`).
        ``shareable``: the bytes object itself, if other calls may send the same object. Then it is written
        only once.
        """
        part = SideBytes(view, IMMUTABLE if immutable else ARRAY, shareable)
        if self._request is not None and address is not None:
            offset = self._request.offset_of(address, view.nbytes)
            if offset is not None:
                part.file_kind, part.offset = IN_REQUEST, offset
        self.all.append(part)
        return _Handle(len(self.all) - 1)

    def take(self, buffer: pickle.PickleBuffer) -> bool:
        """Take a buffer of another type; return True if it stays in the pickle (its ``buffer_callback``)."""
        view = buffer.raw()
        if view.nbytes < SMALL_BYTES:
            return True
        self.all.append(SideBytes(view, BUFFER))
        return False

    def path_to(self, wanted: Any) -> str | None:
        """Return the path of an object in nested lists, tuples and dicts, for example ``"args[0]['w']"``."""
        for name, root in self._roots:
            path = _path_to(root, wanted, _MAX_DEPTH)
            if path is not None:
                return name + path
        return None

    def refer_to(self, shared: SharedFile) -> None:
        """Refer to the shared file for the parts in it, instead of writing them again."""
        for part in self.all:
            if part.shareable is not None and (offset := shared.offset_of(part.shareable)) is not None:
                part.file_kind, part.offset = IN_SHARED, offset

    def copy_what_would_hold_too_much(self) -> None:
        """Copy overlapping parts of the request, or all parts if they are less than half of the request.

        Otherwise small results would keep a large request in memory.
        """
        inside = sorted(
            (part for part in self.all if part.file_kind == IN_REQUEST), key=lambda part: part.offset
        )
        total = end = 0
        for part in inside:
            if part.offset < end:
                part.file_kind = (
                    IN_THIS_FILE  # Overlapping arrays become two separate arrays, as in any pickle.
                )
                continue
            end = part.offset + part.view.nbytes
            total += part.view.nbytes
        if self._request is not None and total < self._request.size / 2:
            for part in inside:
                part.file_kind = IN_THIS_FILE


class _Handle:
    def __init__(self, index: int) -> None:
        self._index = index

    def __reduce__(self) -> Any:
        return _region, (self._index,)


class _Reading(threading.local):
    """The regions of the file that this thread is reading."""

    regions: Sequence[Region] | None = None


_reading = _Reading()


def _region(index: int) -> Region:
    """Return a region of the file that is being read. Pickles call this function."""
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


#: A function that gets an object and the parts for its bytes. It returns the same as a ``__reduce__`` method.
Reduce = Callable[[Any, Parts], Any]

_reducers: dict[type, Reduce] = {}


def register(kind: type, reduce: Reduce) -> None:
    """Set the function that reduces objects of exactly this type."""
    _reducers[kind] = reduce


def dumps_by_name(value: Any, parts: Parts) -> bytes:
    """Return the pickle of a value. Classes and functions go by name, as in the standard library."""
    return _dumps(_ByName, value, parts)


def dumps_by_value(value: Any, parts: Parts, note: Callable[[Any], None] | None = None) -> bytes:
    """Return the pickle of a value. Objects that the other process cannot import go by value (cloudpickle).

    ``note``: called with each function and each class in the value, when it is pickled for the first time.
    """
    return _dumps(partial(_ByValue, note=note), value, parts)


def loads(head: bytes, regions: Sequence[Region], buffers: Iterable[memoryview]) -> Any:
    """Return the value of a pickle from one of these functions; WorkerError if it cannot be read."""
    previous, _reading.regions = _reading.regions, regions
    try:
        return pickle.loads(head, buffers=buffers)
    except (pickle.UnpicklingError, EOFError) as error:
        raise WorkerError(f"a memory file between worker and caller cannot be read: {error}") from error
    finally:
        _reading.regions = previous


# Packages that every process can import. Messages consist of objects of their classes.
_IMPORTABLE = {"flwr", "flower_gpu", "numpy"}


class _ByName(pickle.Pickler):
    def __init__(self, file: io.BytesIO, parts: Parts) -> None:
        # This is set before pickle's own __init__, which reads it once.
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
        # This saves time, because cloudpickle would look up the class of each object again.
        kind = obj if isinstance(obj, type) else type(obj)
        if str(kind.__module__).partition(".")[0] in _IMPORTABLE and "<locals>" not in kind.__qualname__:
            return NotImplemented
        return super().reducer_override(obj)


def _code_by_value(code: CodeType) -> tuple[Any, ...]:
    # From version 3.1.3 on, cloudpickle drops the file name, and tracebacks would not say where a line is.
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
    if "numpy" in sys.modules:  # Otherwise there can be no array, so numpy need not be imported.
        import numpy as np

        yield np.ndarray, reduce_array
    yield from _reducers.items()


# Kinds of types for which numpy's own pickles are used. For dates, these lose byte order and the read-only
# flag.
_SIMPLE = "biufc"
# With less, torch's kernels crash on complex128.
_ALIGNMENT = 16


def reduce_array(array: NDArray[Any], parts: Parts) -> Any:
    """Return the reduction of an array. Many bytes go next to the pickle, few into it.

    Raises TypeError for an array of objects.
    """
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
        # An array from np.broadcast_to can look like a million rows but hold one, so only one row is sent.
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
    raw = array.reshape(-1, order=order).view(np.uint8)  # as bytes, because dates have no buffer interface
    file_kind = (
        PickleBuffer(raw.data) if small else parts.add(raw.data, address=raw.__array_interface__["data"][0])
    )
    return build, (file_kind, array.dtype, array.shape, order, writeable)


def build(
    content: Region | bytes | bytearray, dtype: Any, shape: tuple[int, ...], order: Any, writeable: bool
) -> Any:
    """Return an array with these bytes, without copying them; WorkerError if their number is wrong."""
    import numpy as np

    memory = content.memory if isinstance(content, Region) else memoryview(content)
    if not writeable:
        memory = memory.toreadonly()
    count = 1
    for length in shape:
        count *= length
    if count * dtype.itemsize != memory.nbytes:
        raise WorkerError(f"{memory.nbytes} bytes arrived for an array of shape {shape} and type {dtype}")
    return aligned(np.ndarray(shape, dtype, memory, order=order))


def aligned(array: NDArray[Any]) -> NDArray[Any]:
    """Return the array, or an aligned copy if torch's kernels could crash on its address."""
    if array.__array_interface__["data"][0] % _ALIGNMENT == 0:
        return array
    copy = array.copy(order="K")
    copy.flags.writeable = array.flags.writeable
    return copy
