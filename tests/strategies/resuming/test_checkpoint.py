"""The checkpoint of a run: it stays complete if the process is killed, and each round writes little."""

from __future__ import annotations

import json
import random
import shutil
import sys
import threading
import zlib
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_rounds import change_states, check_complete, round_state
from flwr.app import Array, ArrayRecord, MetricRecord, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st
from properties import examples
from record_states import RecordStates
from record_strategies import array_record, arrays, contents, filled, number_of, record_dicts, texts

from flower_gpu.errors import ConfigError, FlowerGPUError
from flower_gpu.strategies.resuming.checkpoint import FORMAT_VERSION, INDEX_NAME, Checkpoints
from flower_gpu.strategies.rounds import RoundState, capture_random_state

Script = Callable[..., Any]

metrics = st.builds(MetricRecord, st.dictionaries(texts, st.floats() | st.lists(st.integers()), max_size=3))
by_round = st.dictionaries(st.integers(0, 50), metrics, max_size=3)


round_states = st.builds(
    RoundState,
    server_round=st.integers(0, 10**6),
    arrays=st.builds(array_record, st.dictionaries(texts, arrays, max_size=4)),
    train_metrics=by_round,
    evaluate_metrics=by_round,
    client_metrics=by_round,
    random_state=st.builds(capture_random_state),
    strategy=texts,
    strategy_state=record_dicts,
)


def write_rounds(folder: Path, rounds: range, identity: dict[str, Any] | None = None) -> RecordStates:
    states = RecordStates()
    checkpoints = Checkpoints(folder, states, identity)
    for number in rounds:
        change_states(states, number)
        checkpoints.write(round_state(number))
    return states


def state_files(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in folder.glob("*.states")}


@given(round_states, st.dictionaries(st.integers(0, 20), record_dicts, max_size=4))
@settings(max_examples=examples(15))
def test_a_round_is_read_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, expected: RoundState, kept: dict[int, RecordDict]
) -> None:
    folder = tmp_path_factory.mktemp("checkpoint")
    states = RecordStates()
    for partition, state in kept.items():
        states.put(partition, state)
    Checkpoints(folder, states).write(expected)
    resumed = RecordStates()
    restored = Checkpoints(folder, resumed).read()
    assert restored is not None
    for name in ("train_metrics", "evaluate_metrics", "client_metrics"):
        ours, theirs = getattr(restored, name), getattr(expected, name)
        assert list(ours) == list(theirs)
        assert contents(RecordDict({str(n): ours[n] for n in ours})) == contents(
            RecordDict({str(n): theirs[n] for n in theirs})
        )
    assert contents(RecordDict({"": restored.arrays})) == contents(RecordDict({"": expected.arrays}))
    assert (restored.server_round, restored.random_state) == (expected.server_round, expected.random_state)
    for partition, state in kept.items():
        assert contents(resumed.get(partition)) == contents(state)


def test_a_state_that_has_not_changed_is_not_written_again(tmp_path: Path) -> None:
    states = RecordStates()
    checkpoints = Checkpoints(tmp_path, states)
    for partition in range(10):
        states.put(partition, filled(partition))
    checkpoints.write(round_state(0))
    ((first, size),) = state_files(tmp_path).items()
    original = (tmp_path / first).read_bytes()
    states.put(3, filled(33))
    states.put(4, states.get(4))
    checkpoints.write(round_state(1))
    added = {name: size for name, size in state_files(tmp_path).items() if name != first}
    assert list(added.values()) == [size // 10]
    assert (tmp_path / first).read_bytes() == original
    checkpoints.write(round_state(2))
    assert state_files(tmp_path) == {first: size, **added}
    resumed = RecordStates()
    Checkpoints(tmp_path, resumed).read()
    assert [number_of(resumed.get(partition)) for partition in range(10)] == [0, 1, 2, 33, *range(4, 10)]


def test_files_take_at_most_twice_the_size_in_use(tmp_path: Path) -> None:
    states = RecordStates()
    checkpoints = Checkpoints(tmp_path, states)
    numbers = random.Random(0)
    expected = dict.fromkeys(range(40), 0)
    for partition in expected:
        states.put(partition, filled(0))
    in_use = sum(map(states.size_bytes, expected))
    for server_round in range(25):
        for partition in numbers.sample(range(40), 8):
            states.put(partition, filled(server_round))
            expected[partition] = server_round
        checkpoints.write(round_state(0))
        assert in_use <= sum(state_files(tmp_path).values()) <= 2 * in_use
    resumed = RecordStates()
    Checkpoints(tmp_path, resumed).read()
    assert {partition: number_of(resumed.get(partition)) for partition in expected} == expected
    assert {partition: number_of(states.get(partition)) for partition in expected} == expected


def test_a_state_in_the_checkpoint_is_evicted_without_being_written(tmp_path: Path) -> None:
    folder, checkpoint = tmp_path / "states", tmp_path / "checkpoint"
    states = RecordStates(folder, 1500)
    checkpoints = Checkpoints(checkpoint, states)
    states.put(0, filled(1, 800))
    checkpoints.write(round_state(1))
    states.put(1, filled(2, 800))
    assert not folder.exists()
    states.put(2, filled(3, 800))
    # Only the state that has no copy in the checkpoint is written.
    assert len(list(folder.iterdir())) == 1
    checkpoints.write(round_state(2))
    assert list(folder.iterdir()) == []
    assert [number_of(states.get(partition)) for partition in range(3)] == [1, 2, 3]


def test_an_emptied_state_is_removed_from_the_checkpoint(tmp_path: Path) -> None:
    states = RecordStates()
    checkpoints = Checkpoints(tmp_path, states)
    states.put(0, filled(1))
    checkpoints.write(round_state(1))
    states.put(0, RecordDict())
    checkpoints.write(round_state(2))
    assert state_files(tmp_path) == {}
    resumed = RecordStates()
    Checkpoints(tmp_path, resumed).read()
    assert not resumed.get(0)


def model_files(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in folder.glob("*.model")}


def kept_by(models: dict[int, ArrayRecord], number: int) -> RoundState:
    """Return the state after a round of a strategy that keeps models of earlier rounds."""
    kept = RecordDict({f"of round {earlier}": models[earlier] for earlier in models if earlier != number})
    return replace(round_state(number), arrays=models[number], strategy_state=kept)


def test_an_earlier_model_is_written_once_and_removed_when_no_longer_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, RecordStates())
    models: dict[int, ArrayRecord] = {}
    last: dict[str, int] = {}
    for number in range(8):
        models[number] = ArrayRecord({"w": Array(np.full(50_000, float(number)))})
        if number >= 4:
            del models[(0, 2, 1, 3)[number - 4]]
        checkpoints.write(kept_by(models, number))
        written = model_files(tmp_path)
        assert sorted(written) == sorted(f"{earlier + 1}.model" for earlier in models)
        assert all(400_000 < size < 410_000 for size in written.values())
        assert all(last.get(name, size) == size for name, size in written.items())
        last = written
        restored = Checkpoints(tmp_path, RecordStates()).read()
        assert restored is not None and restored.strategy_state is not None
        assert restored == kept_by(models, number)

    resumed = Checkpoints(tmp_path, RecordStates())
    restored = resumed.read()
    assert restored is not None and restored.strategy_state is not None
    new = ArrayRecord({"w": Array(np.full(50_000, 8.0))})
    kept = RecordDict({"of round 7": restored.arrays, **restored.strategy_state})
    resumed.write(replace(round_state(8), arrays=new, strategy_state=kept))
    assert model_files(tmp_path).keys() - last.keys() == {"9.model"}, "the others stay where they are"
    assert {name: size for name, size in model_files(tmp_path).items() if name in last} == last


def test_the_size_of_a_write_does_not_grow_with_the_number_of_rounds(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, RecordStates())
    state = round_state(1)
    # Sizes of the newly written files, and of the metrics of all rounds
    sizes: list[tuple[int, int]] = []
    for number in range(2, 300):
        for field in (state.train_metrics, state.evaluate_metrics, state.client_metrics):
            field[number] = MetricRecord({"loss": 0.5, "accuracy": 0.25})
        state.server_round = number
        checkpoints.write(state)
        (metrics,) = tmp_path.glob("*.metrics")
        others = sum(path.stat().st_size for path in tmp_path.iterdir() if path != metrics)
        sizes.append((others, metrics.stat().st_size))
    assert sizes[-1][0] < sizes[1][0] + 50, "a few digits more"
    lines = [after - before for (_, before), (_, after) in pairwise(sizes)]
    assert max(lines) <= 1.1 * min(lines)
    restored = Checkpoints(tmp_path, RecordStates()).read()
    assert restored == state


@pytest.mark.parametrize("torn", [b'[["train_metrics", 4, [["torn', b"\x00" * 5000, b"[]\n[]\n"])
def test_a_torn_line_after_the_metrics_is_overwritten(tmp_path: Path, torn: bytes) -> None:
    write_rounds(tmp_path, range(4))
    (metrics,) = tmp_path.glob("*.metrics")
    with metrics.open("ab") as file:
        file.write(torn)
    assert check_complete(tmp_path) == 3
    states = RecordStates()
    checkpoints = Checkpoints(tmp_path, states)
    checkpoints.read()
    for number in (4, 5):
        change_states(states, number)
        checkpoints.write(round_state(number))
        assert check_complete(tmp_path) == number
    assert torn not in metrics.read_bytes()


def test_removed_metrics_are_removed_from_the_file(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, RecordStates())
    for number in (5, 3, 4):
        checkpoints.write(round_state(number))
        restored = Checkpoints(tmp_path, RecordStates()).read()
        assert restored == round_state(number) and len(list(tmp_path.glob("*.metrics"))) == 1


def test_a_kept_model_whose_arrays_were_replaced_is_written_again(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, RecordStates())
    model = ArrayRecord({"w": Array(np.zeros(9))})
    kept = RecordDict({"kept": model})
    checkpoints.write(replace(round_state(0), arrays=model, strategy_state=kept))
    model["w"] = Array(np.ones(9))
    state = replace(round_state(1), strategy_state=kept)
    checkpoints.write(state)
    assert Checkpoints(tmp_path, RecordStates()).read() == state


def test_a_run_continues_in_the_same_folder(tmp_path: Path) -> None:
    write_rounds(tmp_path, range(4))
    states = RecordStates(tmp_path / "states", 0)
    checkpoints = Checkpoints(tmp_path, states)
    restored = checkpoints.read()
    assert restored is not None and restored.server_round == 3
    for number in range(4, 9):
        change_states(states, number)
        checkpoints.write(round_state(number))
        assert check_complete(tmp_path) == number


def test_states_that_change_during_a_write_are_never_mixed(tmp_path: Path) -> None:
    states = RecordStates(tmp_path / "states", 1000)
    checkpoints = Checkpoints(tmp_path / "checkpoint", states)
    is_over = threading.Event()

    def change() -> None:
        number = 0
        while not is_over.is_set():
            number += 1
            states.put(number % 7, filled(number))

    thread = threading.Thread(target=change)
    thread.start()
    try:
        for _ in range(10):
            checkpoints.write(round_state(1))
            resumed = RecordStates()
            assert Checkpoints(tmp_path / "checkpoint", resumed).read() is not None
            for partition in range(7):
                data = resumed.get(partition)
                assert not data or number_of(data) % 7 == partition
    finally:
        is_over.set()
        thread.join(60)


IDENTITY = {"app": "digits", "number of nodes": 100, "run config": {"lr": 0.1}, "strategy": "FedAvg"}


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({**IDENTITY, "number of nodes": 50}, "number of nodes was 100 and is 50"),
        ({**IDENTITY, "run config": {"lr": 0.2}}, 'run config was {"lr": 0.1} and is {"lr": 0.2}'),
        ({**IDENTITY, "seed": 1}, "seed (--seed) was not set and is 1"),
        (
            {key: value for key, value in IDENTITY.items() if key != "app"},
            'app was "digits" and is not set',
        ),
    ],
)
def test_a_checkpoint_of_another_run_is_refused_with_the_differences(
    tmp_path: Path, changed: dict[str, Any], text: str
) -> None:
    write_rounds(tmp_path, range(2), IDENTITY)
    states = RecordStates()
    with pytest.raises(ConfigError) as caught:
        Checkpoints(tmp_path, states, changed).read()
    assert text in str(caught.value) and str(tmp_path) in str(caught.value)
    assert str(caught.value).count(" was ") == 1
    assert not states.get(0)
    assert Checkpoints(tmp_path, RecordStates(), IDENTITY).read() is not None


@pytest.mark.parametrize("version", [FORMAT_VERSION - 1, FORMAT_VERSION + 1])
def test_another_format_is_refused_with_advice(tmp_path: Path, version: int) -> None:
    write_rounds(tmp_path, range(1))
    index = tmp_path / INDEX_NAME
    text = index.read_text()
    index.write_text(text.replace(f"format {FORMAT_VERSION}", f"format {version}"))
    with pytest.raises(
        ConfigError, match=rf"its format is version {version}, .* began it, or start it again"
    ):
        Checkpoints(tmp_path, RecordStates()).read()


@pytest.fixture(scope="module")
def checkpoint_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a checkpoint after four rounds."""
    folder = tmp_path_factory.mktemp("written")
    write_rounds(folder, range(4))
    return folder


@pytest.mark.parametrize(
    "changes",
    [
        {"states": [[3, 2, 0, 10, "x"]]},
        {"states": [[3, 2, 1 << 70, 10, 0]]},
        {"states": 1},
        {"model": [0, 10]},
        {"server_round": None},
        {"identity": ["seed"]},
        {"serial": "../../model"},
    ],
)
def test_a_changed_index_is_refused(tmp_path: Path, changes: dict[str, Any], checkpoint_folder: Path) -> None:
    """Its checksum matches the changed contents."""
    shutil.copytree(checkpoint_folder, tmp_path, dirs_exist_ok=True)
    index = tmp_path / INDEX_NAME
    head, text = index.read_text().split("\n")
    text = json.dumps({**json.loads(text), **changes})
    index.write_text(f"{head.rpartition(' ')[0]} {zlib.crc32(text.encode())}\n{text}")
    with pytest.raises(ConfigError, match=r"/(checkpoint\.json|\d\.\w+) is damaged .*in another folder"):
        Checkpoints(tmp_path, RecordStates()).read()


def test_a_damaged_missing_or_short_file_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    kept = RecordStates()
    checkpoints = Checkpoints(folder, kept)
    for number in range(2):
        kept.put(number, filled(number))
        checkpoints.write(round_state(number))
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["1.metrics", "1.states", "2.model", "2.states", INDEX_NAME]
    for name in names:
        path = folder / name
        data = path.read_bytes()
        middle = len(data) // 2
        flipped = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
        for damaged in (flipped, data[:-1], data[:middle], b"", None):
            if damaged is None:
                path.unlink()
            else:
                path.write_bytes(damaged)
            states = RecordStates()
            if damaged is None and name == INDEX_NAME:
                assert Checkpoints(folder, states).read() is None
            else:
                with pytest.raises(FlowerGPUError) as caught:
                    Checkpoints(folder, states).read()
                assert str(path) in str(caught.value) and "in another folder" in str(caught.value)
            assert not states.get(0) and not states.get(1)
        path.write_bytes(data)
    assert Checkpoints(folder, RecordStates()).read() is not None


@given(data=st.data())
@settings(max_examples=examples(60))
def test_an_index_with_a_changed_byte_is_refused_or_equivalent(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, checkpoint_folder: Path
) -> None:
    folder = tmp_path_factory.mktemp("checkpoint")
    shutil.copytree(checkpoint_folder, folder, dirs_exist_ok=True)
    path = folder / INDEX_NAME
    content = bytearray(path.read_bytes())
    place = st.integers(0, 100) | st.integers(0, len(content) - 1)
    content[data.draw(place)] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    try:
        assert check_complete(folder) == 3
    except FlowerGPUError as error:
        assert str(path) in str(error)


# : Start of the scripts, which write rounds in a child process until it is killed.
WRITER = """
import itertools, os, random, signal, sys, time
from flower_gpu.polling import readable
from pathlib import Path
sys.path[:0] = sys.argv[2:]
from checkpoint_rounds import change_states, check_complete, round_state
from flower_gpu.strategies.resuming.checkpoint import Checkpoints
from record_states import RecordStates

folder = Path(sys.argv[1])

def writer():
    states = RecordStates(folder.with_name("states"), 300)
    checkpoints = Checkpoints(folder, states)
    found = checkpoints.read()
    first = 0 if found is None else found.server_round + 1
    def write(number):
        change_states(states, number)
        checkpoints.write(round_state(number))
    return first, write

def wait_for(child):
    _, status = os.waitpid(child, 0)
    return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)

def in_child(function):
    child = os.fork()
    if child == 0:
        try:
            function()
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return child
"""


def test_a_kill_at_any_time_leaves_the_last_or_the_previous_round(run_script: Script, tmp_path: Path) -> None:
    script = """
last = least = -1
numbers = random.Random(0)
for _ in range(5):
    reader, ready = os.pipe()
    def write_until_killed():
        first, write = writer()
        for number in itertools.count(first):
            os.write(ready, number.to_bytes(4, "big"))
            write(number)
    child = in_child(write_until_killed)
    os.close(ready)
    begun = b""
    rounds = numbers.randrange(3)
    while len(begun) < 4 * (rounds + 1):
        assert readable([reader], 30)
        begun += os.read(reader, 1 << 16)
    time.sleep(numbers.uniform(0, 0.03))
    os.kill(child, signal.SIGKILL)
    assert wait_for(child) == -signal.SIGKILL
    while data := os.read(reader, 1 << 16):
        begun += data
    os.close(reader)
    begun = int.from_bytes(begun[-4:], "big")
    found = check_complete(folder)
    assert found in (begun - 1, begun) and found >= last, (found, begun, last)
    last = found
    least += rounds
    assert last >= least
"""
    run_script(
        WRITER + script,
        str(tmp_path / "checkpoint"),
        str(Path(__file__).parents[2]),
    )


def test_between_any_two_lines_the_folder_holds_the_new_or_the_previous_round(tmp_path: Path) -> None:
    """A kill at that moment would leave these files, because the kernel already has the written data."""
    folder = tmp_path / "checkpoint"
    states = RecordStates(tmp_path / "states", 300)
    checkpoints = Checkpoints(folder, states)
    rounds_seen: list[int] = []
    previous: list[tuple[str, int, int]] = []

    def look(frame: Any, event: str, argument: Any) -> Any:
        nonlocal previous
        if Path(frame.f_code.co_filename).name not in ("checkpoint.py", "states.py"):
            return None
        now = [(path.name, path.stat().st_ino, path.stat().st_size) for path in sorted(folder.glob("*"))]
        if now != previous:
            previous = now
            rounds_seen.append(check_complete(folder))
        return look

    rounds = 9
    for number in range(rounds):
        change_states(states, number)
        state = round_state(number)
        rounds_seen.clear()
        traced = sys.gettrace()
        sys.settrace(look)
        try:
            checkpoints.write(state)
        finally:
            sys.settrace(traced)
        rounds_seen.append(check_complete(folder))
        # New files appear, then the index is replaced, then old files are removed.
        assert rounds_seen == sorted(rounds_seen) and set(rounds_seen) == {number - 1, number}
        assert rounds_seen.count(number - 1) >= 2 and len(rounds_seen) >= 6


def test_a_failed_write_is_an_error_and_keeps_the_previous_round(run_script: Script, tmp_path: Path) -> None:
    """A limit on the size of files stands in for a full disk."""
    script = """
import resource
from flower_gpu.errors import FlowerGPUError
first, write = writer()
for number in range(5):
    write(number)
before = sorted(path.name for path in folder.iterdir())
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
told = []
for limit in (100, 400, 5000, 20_000):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        write(5)
    except FlowerGPUError as error:
        assert "iB" in str(error) or " B " in str(error), error
        assert str(folder.parent) in str(error), error
        told.append(str(error))
    else:
        raise AssertionError("written")
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert sorted(path.name for path in folder.iterdir()) == before
    assert check_complete(folder) == 4
assert any("continue from the checkpoint, which is that of the round before" in text for text in told)
write(5)
assert check_complete(folder) == 5
"""
    run_script(
        WRITER + script,
        str(tmp_path / "checkpoint"),
        str(Path(__file__).parents[2]),
    )
