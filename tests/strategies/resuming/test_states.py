"""States that virtual nodes keep between messages: complete, isolated, and in bounded memory."""

from __future__ import annotations

import errno
import gc
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from hypothesis import given, settings
from properties import examples
from record_states import RecordStates
from record_strategies import contents, filled, number_of, record_dicts

from flower_gpu.errors import FlowerGPUError
from flower_gpu.flower import record_bytes
from flower_gpu.simulation.nodes import VirtualNodes
from flower_gpu.strategies.resuming.states import disk_error
from flower_gpu.workers import transport

SIZE = len(record_bytes.encode(filled(0)))

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def names(folder: Path) -> list[str]:
    return sorted(path.name.partition("-")[0] for path in folder.iterdir()) if folder.exists() else []


@given(record_dicts)
@settings(max_examples=examples(60))
def test_records_are_restored_from_bytes(records: RecordDict) -> None:
    original = contents(records)
    decoded = record_bytes.decode(record_bytes.encode(records))
    assert contents(decoded) == original
    assert contents(record_bytes.decode(record_bytes.encode(decoded))) == original


@given(first=record_dicts, second=record_dicts)
@settings(max_examples=examples(20))
@pytest.mark.parametrize("limit", [0, 1000, 10**9])
def test_the_state_of_a_node_is_the_last_that_was_put(
    tmp_path_factory: pytest.TempPathFactory, limit: int, first: RecordDict, second: RecordDict
) -> None:
    states = RecordStates(tmp_path_factory.mktemp("states"), limit)
    for partition, state in ((0, first), (1, second), (0, second), (0, first), (1, first)):
        states.put(partition, state)
        assert contents(states.get(partition)) == contents(state)
    assert contents(states.get(0)) == contents(first)
    states.close()


def test_bytes_of_something_else_are_refused() -> None:
    data = record_bytes.encode(filled(1))
    with pytest.raises(ValueError, match="not records"):
        record_bytes.decode(b"something" * 10)
    with pytest.raises(ValueError, match="too early"):
        record_bytes.decode(data[:-1])


def test_a_list_that_flower_does_not_take_is_refused_and_the_old_state_stays(tmp_path: Path) -> None:
    states = RecordStates(tmp_path, 0)
    config = ConfigRecord({"list": [1, 2]})
    states.put(0, RecordDict({"config": config}))
    config["list"].append("three")  # type: ignore[union-attr, arg-type]
    with pytest.raises(TypeError):
        states.put(0, RecordDict({"config": config}))
    assert states.get(0)["config"]["list"] == [1, 2]  # type: ignore[index]


@pytest.mark.parametrize("limit", [0, 10**9])
def test_stored_states_do_not_change_with_objects_that_were_put_or_got(tmp_path: Path, limit: int) -> None:
    states = RecordStates(tmp_path, limit)
    state = filled(1, 10_000)
    state["config"]["list"] = [1]  # type: ignore[index]
    states.put(0, state)
    for changed in (state, states.get(0)):
        changed["arrays"]["a"].numpy()[:] = 9  # type: ignore[index, union-attr]
        changed["config"]["list"].append(2)  # type: ignore[index, union-attr]
        changed["config"]["number"] = 9  # type: ignore[index]
        del changed["arrays"]
    assert number_of(states.get(0)) == 1
    assert states.get(0)["config"]["list"] == [1]  # type: ignore[index]


def test_the_least_recently_used_states_beyond_the_limit_go_to_files(tmp_path: Path) -> None:
    folder = tmp_path / "late" / "states"
    states = RecordStates(folder, 3 * SIZE)
    for partition in range(3):
        states.put(partition, filled(partition))
    assert not folder.exists()
    states.get(0)
    states.put(3, filled(3))
    assert names(folder) == ["1"]
    states.put(2, filled(22))
    states.put(4, filled(4))
    assert names(folder) == ["0", "1"]
    assert states.memory_bytes == 3 * SIZE
    # This state moves from its file into memory.
    states.put(1, filled(11))
    assert names(folder) == ["0", "3"]
    assert [number_of(states.get(partition)) for partition in range(5)] == [0, 11, 22, 3, 4]
    assert states.memory_bytes == 3 * SIZE
    states.close()
    assert not folder.exists() and states.memory_bytes == 0


def test_a_state_larger_than_the_limit_goes_to_a_file_and_evicts_no_other(tmp_path: Path) -> None:
    states = RecordStates(tmp_path, 2 * SIZE)
    states.put(0, filled(0))
    for number in (1, 2):
        states.put(1, filled(number, 10_000))
        assert names(tmp_path) == ["1"]
        assert states.memory_bytes == SIZE
        assert number_of(states.get(1)) == number
    states.put(1, filled(3))
    assert names(tmp_path) == []


@pytest.mark.parametrize("limit", [0, 10**9])
def test_a_state_that_has_not_changed_is_not_written_again(tmp_path: Path, limit: int) -> None:
    states = RecordStates(tmp_path, limit)
    states.put(0, filled(1))
    with states.hold_changes() as changed:
        states.saved({})
        original = list(tmp_path.iterdir())
        states.put(0, states.get(0))
        assert not changed and list(tmp_path.iterdir()) == original
        states.put(0, filled(2))
        assert changed == {0}


def test_only_the_files_of_an_earlier_run_are_deleted(tmp_path: Path) -> None:
    for name in ("3-7.state", "notes.state"):
        (tmp_path / name).write_text("x")
    RecordStates(tmp_path, 0).put(0, filled(1))
    assert names(tmp_path) == ["0", "notes.state"]


@linux_only
def test_a_state_does_not_keep_its_reply_mapped(tmp_path: Path) -> None:
    states = RecordStates(tmp_path, 10**9)
    descriptor = transport.create("reply-of-a-test")
    reply = {"model": np.zeros(1 << 20), "state": filled(1, 10_000)}
    transport.write_reply(reply, descriptor)
    reply = transport.read_reply(descriptor)
    os.close(descriptor)
    states.put(0, reply["state"])
    assert "reply-of-a-test" in Path("/proc/self/maps").read_text()
    del reply
    gc.collect()
    assert "reply-of-a-test" not in Path("/proc/self/maps").read_text()
    assert number_of(states.get(0)) == 1


@linux_only
@pytest.mark.parametrize("limit", [0, 10**9])
def test_thousands_of_states_take_no_descriptors_and_no_maps(tmp_path: Path, limit: int) -> None:
    def held() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(Path("/proc/self/maps").read_text().splitlines())  # noqa: PTH208

    states = RecordStates(tmp_path, limit)
    descriptors, maps = held()
    got = []
    for partition in range(1000):
        states.put(partition, filled(partition))
        got.append(states.get(partition))
    assert [number_of(state) for state in got] == list(range(1000))
    now = held()
    assert now[0] == descriptors
    assert now[1] < maps + 50


@pytest.mark.parametrize("limit", [0, 3 * SIZE, 10**9])
def test_threads_with_different_nodes_lose_no_states(tmp_path: Path, limit: int) -> None:
    states = RecordStates(tmp_path, limit)

    def work(first: int) -> None:
        for number in range(1, 41):
            for partition in range(first, 24, 6):
                state = states.get(partition)
                assert (number_of(state) if state else 0) == number - 1
                states.put(partition, filled(number))

    in_threads([lambda first=first: work(first) for first in range(6)])  # type: ignore[misc]
    assert [number_of(states.get(partition)) for partition in range(24)] == [40] * 24
    assert states.memory_bytes <= limit
    assert len(names(tmp_path)) == {0: 24, 3 * SIZE: 21}.get(limit, 0)
    states.close()
    assert names(tmp_path) == [] and states.memory_bytes == 0


def test_a_damaged_or_missing_file_is_named(tmp_path: Path) -> None:
    states = RecordStates(tmp_path, 0)
    states.put(0, filled(1))
    (path,) = tmp_path.iterdir()
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(FlowerGPUError, match=r"0-1\.state is damaged"):
        states.get(0)
    path.unlink()
    with pytest.raises(FlowerGPUError, match=r"0-1\.state cannot be read"):
        states.get(0)
    states.put(0, filled(1))
    assert number_of(states.get(0)) == 1


def test_a_failed_write_is_an_error_and_leaves_the_states_unchanged(
    run_script: Callable[..., Any], tmp_path: Path
) -> None:
    """A limit on the size of files stands in for a full disk."""
    run_script(
        """
        import resource, sys
        from pathlib import Path
        sys.path.insert(0, sys.argv[2])
        from flower_gpu.errors import FlowerGPUError
        from record_states import RecordStates
        from record_strategies import filled, number_of

        folder = Path(sys.argv[1])
        states = RecordStates(folder, 25_000)
        states.put(0, filled(0, 10_000))
        states.put(1, filled(1, 10_000))
        before = states.memory_bytes
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))
        for partition, size in ((0, 30_000), (1, 15_000), (2, 10_000), (2, 30_000)):
            try:
                states.put(partition, filled(9, size))
            except FlowerGPUError as error:
                for text in (str(folder), "KiB", "state_memory"):
                    assert text in str(error), error
            else:
                raise AssertionError("written")
            assert [number_of(states.get(found)) for found in range(2)] == [0, 1]
            assert not states.get(2) and states.memory_bytes == before and not list(folder.iterdir())
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        states.put(2, filled(2, 10_000))
        assert [number_of(states.get(found)) for found in range(3)] == [0, 1, 2]
        """,
        str(tmp_path / "states"),
        str(Path(__file__).parents[2]),
    )


def test_the_error_of_a_full_disk_says_where_and_how_much(tmp_path: Path) -> None:
    error = disk_error(OSError(errno.ENOSPC, "No space left on device"), tmp_path, 3 << 20, "Free space")
    text = str(error)
    assert "the disk is full" in text and str(tmp_path) in text and "3 MiB" in text and " are free" in text


def test_a_context_has_a_copy_of_the_state() -> None:
    """A failed call leaves the stored state unchanged."""
    nodes = VirtualNodes(3, 0, 1, {})
    state = record_bytes.encode(filled(1))
    changed = nodes.context_of(nodes.ids[1], state)
    changed.state["config"]["number"] = 2  # type: ignore[index]
    del changed.state["arrays"]
    assert number_of(nodes.context_of(nodes.ids[1], state).state) == 1
    assert not nodes.context_of(nodes.ids[0], b"").state


def test_a_state_is_not_sent_as_a_shared_model() -> None:
    """Bytes that come again count as the model of a round, which is written again for all workers."""
    states = RecordStates()
    states.put(0, RecordDict({"arrays": ArrayRecord({"a": Array(np.zeros(1 << 18))})}))
    context = states.get(0)
    descriptor = transport.create("request-of-a-test")
    try:
        parts = transport.Parts([("state", context)])
        transport.regions.dumps_by_value(context, parts)
        assert parts.all and all(part.shareable is None for part in parts.all)
    finally:
        os.close(descriptor)


def in_threads(functions: list[Callable[[], None]]) -> None:
    """Run functions at the same time. Raise an error that any of them raises."""
    errors: list[BaseException] = []

    def run(function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    if errors:
        raise errors[0]
