"""How often a step crosses the network, as TensorFlow's profiler sees it on the tasks themselves."""

from __future__ import annotations

import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.tsl.profiler.protobuf import xplane_pb2

import kerasps

PROFILED_MS = 300


def dense_model():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8), keras.layers.Dense(8), keras.layers.Dense(1)])
    return model, np.ones((64, 8), "float32")


def table_model():
    model = keras.Sequential([keras.Input((8,), dtype="int32"), keras.layers.Embedding(100, 4), keras.layers.Flatten()])
    model.add(keras.layers.Dense(1))
    return model, np.ones((64, 8), "int32")


def sends_of(path):
    """How many tensors the task sent to others meanwhile."""
    space = xplane_pb2.XSpace.FromString(path.read_bytes())
    names = [
        plane.event_metadata[event.metadata_id].name for plane in space.planes for line in plane.lines for event in line.events
    ]
    # "_Send:_Send" is an eager copy, which no graph of a step makes.
    return sum(name.endswith(":_Send") and name != "_Send:_Send" for name in names)


@pytest.mark.parametrize(("make", "most"), [(dense_model, 1), (table_model, 2)], ids=["dense", "table"])
def test_a_step_sends_each_ps_one_tensor_and_takes_one(strategy, sharded, tmp_path, make, most):
    """A table takes one more, which says what rows the step asks for."""
    sharded(2, min_bytes=64)
    with strategy.scope():
        model, x = make()
        model.compile("adam", "mse", steps_per_execution=10)
    data = kerasps.DatasetCreator(lambda context: tf.data.Dataset.from_tensors((x, np.ones((64, 1), "float32"))).repeat())
    model.fit(data, steps_per_epoch=20, verbose=0)

    addresses = {task: f"grpc://{address}" for task, address in strategy.description.server_addresses.items()}
    urls = ",".join(url for (kind, _), url in addresses.items() if kind in ("worker", "ps"))
    options = tf.profiler.experimental.ProfilerOptions(host_tracer_level=3, python_tracer_level=0, device_tracer_level=0)
    profiler = threading.Thread(
        target=tf.profiler.experimental.client.trace, args=[urls, str(tmp_path), PROFILED_MS], kwargs={"options": options}
    )
    profiler.start()
    while profiler.is_alive():
        model.fit(data, steps_per_epoch=200, verbose=0)

    port = addresses["worker", 0].rpartition(":")[2]
    sends = {path: sends_of(path) for path in tmp_path.rglob("*.xplane.pb")}
    of_worker = sum(count for path, count in sends.items() if port in path.name)
    of_ps = sum(count for path, count in sends.items() if port not in path.name)
    assert of_ps > 40
    # The worker's and the ps's profiles do not begin and end at the same moment; an execution of 10 steps sends a few more.
    assert (most - 0.5) * of_ps < of_worker < (most + 0.5) * of_ps
