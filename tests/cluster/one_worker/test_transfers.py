"""How often a step crosses the network, and when, as TensorFlow's profiler sees it on each task."""

from __future__ import annotations

import collections
import re
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.tsl.profiler.protobuf import xplane_pb2

import kerasps
from kerasps.runtime.devices import ps_index
from kerasps.step.phases import pull
from kerasps.variables.placing.placement import PlacementLedger


@pytest.fixture(autouse=True)
def small_variables():
    """Are placed as users have it in each test."""


@pytest.fixture(autouse=True)
def large_values():
    """Travel as users have it in each test."""


# Steps in an execution, executions in a `fit`, and how many a profile must hold at least.
STEPS, FIT_EXECUTIONS, EXECUTIONS_SEEN = 10, 20, 10


def dense_model(units):
    layers = [keras.layers.Dense(units), keras.layers.Dense(units), keras.layers.Dense(1)]
    return keras.Sequential([keras.Input((8,)), *layers]), np.ones((64, 8), "float32")


def small_model():
    return dense_model(8)


def large_model():
    """A kernel of 1 MB, in shards of 512 KB."""
    return dense_model(512)


def table_model():
    model = keras.Sequential(
        [keras.Input((8,), dtype="int32"), keras.layers.Embedding(100, 4), keras.layers.Flatten()]
    )
    model.add(keras.layers.Dense(1))
    return model, np.ones((64, 8), "int32")


def events_in(path):
    """Yield the name of each event of a profile, and when it began and ended, in nanoseconds."""
    for plane in xplane_pb2.XSpace.FromString(path.read_bytes()).planes:
        for line in plane.lines:
            for event in line.events:
                began = line.timestamp_ns + event.offset_ps / 1e3
                name = plane.event_metadata[event.metadata_id].name
                yield name, began, began + event.duration_ps / 1e3


def sends_per_execution(path):
    """Return how many tensors the task sent to others in each execution; None if it saw too few."""
    names = collections.Counter(name for name, _, _ in events_in(path))
    # "_Send:_Send" is an eager copy, which no graph of a step makes.
    sends = {n: k for n, k in names.items() if n.endswith(":_Send") and n != "_Send:_Send"}
    num_executions = max(sends.values(), default=0)
    if num_executions < EXECUTIONS_SEEN:
        return None
    # A send has a name of its own and is made once in each execution. Those of a dataset's graph
    # are made once in a `fit`, which has FIT_EXECUTIONS.
    return sum(count > num_executions / 2 for count in sends.values())


def profiled(strategy, work, log_dir, duration_ms):
    """Repeat `work` for so long; return the file of each task's profile of that."""
    addresses = strategy.description.server_addresses
    profiler = threading.Thread(
        target=tf.profiler.experimental.client.trace,
        args=[",".join(f"grpc://{a}" for a in addresses.values()), str(log_dir), duration_ms],
        kwargs={
            "options": tf.profiler.experimental.ProfilerOptions(
                host_tracer_level=3, python_tracer_level=0, device_tracer_level=0
            )
        },
    )
    profiler.start()
    while profiler.is_alive():
        work()
    return {
        task: next(log_dir.rglob(f"*_{address.rpartition(':')[2]}.xplane.pb"))
        for task, address in addresses.items()
    }


@pytest.mark.parametrize(
    ("make", "num_ps", "num_large"),
    [
        pytest.param(small_model, 1, 0, marks=pytest.mark.matrix),
        pytest.param(large_model, 2, 1, marks=pytest.mark.matrix),
        (table_model, 2, 0),
    ],
    ids=["small", "large", "table"],
)
def test_a_step_sends_each_ps_one_tensor_and_takes_one(
    strategy, sharded, tmp_path, make, num_ps, num_large
):
    """Each large shard takes one more, either way. A table takes one more for all steps of an
    execution: what rows they ask for.

    What is small and whole is on one ps.
    """
    sharded(num_ps, min_bytes=64)
    with strategy.scope():
        model, x = make()
        model.compile("adam", "mse", steps_per_execution=STEPS)
    data = kerasps.DatasetCreator(
        lambda context: tf.data.Dataset.from_tensors((x, np.ones((64, 1), "float32"))).repeat()
    )

    def work():
        model.fit(data, steps_per_epoch=FIT_EXECUTIONS * STEPS, verbose=0)

    work()
    for duration_ms in (300, 1_000, 4_000, 16_000):  # until enough is seen, on any machine
        paths = profiled(strategy, work, tmp_path / str(duration_ms), duration_ms)
        sends = {task: sends_per_execution(path) for task, path in paths.items()}
        seen = [count for count in sends.values() if count is not None]
        if len(seen) > num_ps:
            break
    assert len(seen) == 1 + num_ps, "too few executions in 16 s, or too many tasks in steps"
    # An execution sends a tensor or two of its own, which are fewer than its steps.
    of_ps = 1 + num_large
    assert sends["worker", 0] // STEPS == num_ps * of_ps
    assert sorted(count // STEPS for count in seen) == sorted([num_ps * of_ps] + [of_ps] * num_ps)


def large_steps(path):
    """Return of each step that a profile of a worker holds its products and sends of gradients.

    These are lists of pairs: when each began and ended. A step begins with the product of the layer
    named "first" in its forward pass.
    """
    steps, current = [], {}
    for name, began, ended in sorted(events_in(path), key=lambda event: event[1]):
        scope = re.match(r"compute_phase\w*(?=/)", name)
        if scope is None or not name.endswith((":_Send", "MatMul")):
            continue
        if re.search(r"^(?!.*gradient_tape).*/first(_\d+)*/.*MatMul$", name):
            current[scope.group()] = ([], [])
            steps.append(current[scope.group()])
        if scope.group() in current:
            current[scope.group()][name.endswith(":_Send")].append((began, ended))
    return [step for step in steps if len(step[0]) == NUM_PRODUCTS and step[1]]


# Four on each of two ps: two go at once, and the others in their turn.
NUM_LAYERS = 8
# Forward, and backward for each weight and for each input but the first.
NUM_PRODUCTS = 3 * NUM_LAYERS - 1


@pytest.mark.matrix
def test_pull_compute_and_push_of_a_large_model_overlap(strategy, tmp_path, monkeypatch):
    """The first layer computes before the last one is sent, and gradients leave before all are
    known.
    """
    monkeypatch.setattr(pull, "PART_BYTES", 2**20)
    # Without what earlier tests have left: each of the two ps holds four layers.
    monkeypatch.setattr(strategy.extended, "ledger", PlacementLedger(2))
    width = 1024
    with strategy.scope():
        names = ["first", *(f"other{number}" for number in range(1, NUM_LAYERS))]
        layers = [keras.layers.Dense(width, activation="relu", name=name) for name in names]
        model = keras.Sequential([keras.Input((width,)), *layers])
        model.compile("sgd", "mse", steps_per_execution=STEPS)
    x = np.ones((256, width), "float32")
    data = kerasps.DatasetCreator(lambda context: tf.data.Dataset.from_tensors((x, x)).repeat())

    def work():
        model.fit(data, steps_per_epoch=2 * STEPS, verbose=0)

    work()
    for duration_ms in (2_000, 16_000):
        paths = profiled(strategy, work, tmp_path / str(duration_ms), duration_ms)
        steps = large_steps(paths["worker", 0])
        if len(steps) >= STEPS:
            break
    assert len(steps) >= STEPS
    # The other ps may answer later, since its push ended later.
    ps = ps_index(layers[0].kernel.value.device)
    sent_by_ps = [began for name, began, _ in events_in(paths["ps", ps]) if name.endswith(":_Send")]
    begins = [min(began for began, _ in products) for products, _ in steps]
    ends = [max(ended for _, ended in products) for products, _ in steps]
    pulls = [
        any(begin < sent < end for sent in sent_by_ps)
        for begin, end in zip(begins, ends, strict=True)
    ]
    pushes = [
        any(began < end for began, _ in sends) for (_, sends), end in zip(steps, ends, strict=True)
    ]
    # Of a product that sends in another order none does. On a busy machine, half of the steps did.
    assert np.mean(pulls) > 0.2
    assert np.mean(pushes) > 0.2
