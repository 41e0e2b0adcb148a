"""How the replicas of a step take turns, and which devices a user may name for them."""

from __future__ import annotations

import threading

import pytest
import tensorflow as tf

from kerasps.cluster.description.worker_devices import checked_device_names, compute_devices
from kerasps.cluster.server import _cpu_devices
from kerasps.errors import ClusterConfigError, UnsupportedError
from kerasps.step.compute.replicas import Lockstep


def in_graph(function):
    """Run a function while a graph is built."""
    with tf.Graph().as_default():
        return function()


def test_replicas_run_one_at_a_time_and_meet():
    seen = []

    def body(replica):
        for value in (10, 20):
            seen.append((replica, value))
            values = lockstep.meet(value + replica)
            seen.append((replica, values))
        return replica

    def run():
        nonlocal lockstep
        lockstep = Lockstep([lambda r=r: body(r) for r in range(3)])
        return lockstep.run()

    lockstep = None
    assert in_graph(run) == [0, 1, 2]
    assert seen[:3] == [(0, 10), (1, 10), (2, 10)]
    # What the first does behind a meeting, it has done before the second goes on.
    assert seen[3:5] == [(0, [10, 11, 12]), (0, 20)]
    assert seen[-3:] == [(r, [20, 21, 22]) for r in range(3)]


def test_the_error_of_a_replica_ends_the_others():
    before = threading.active_count()

    def fail():
        raise RuntimeError("this one")

    def run():
        lockstep = Lockstep([lambda: lockstep.meet(1), fail])
        lockstep.run()

    with pytest.raises(RuntimeError, match="this one"):
        in_graph(run)
    assert threading.active_count() == before


def test_replicas_that_do_not_meet_equally_often_are_refused():
    def run():
        lockstep = Lockstep([lambda: lockstep.meet(1), lambda: None])
        lockstep.run()

    with pytest.raises(UnsupportedError, match="did not apply their optimizers equally often"):
        in_graph(run)


def test_replicas_are_in_the_graph_and_the_scopes_of_who_traces_them():
    def run():
        graph = tf.compat.v1.get_default_graph()

        def body(device):
            with tf.device(device):
                return tf.compat.v1.get_default_graph() is graph, tf.constant(1).device

        return Lockstep([lambda d=d: body(d) for d in ("CPU:0", "CPU:1")]).run()

    assert in_graph(run) == [(True, "/device:CPU:0"), (True, "/device:CPU:1")]


@pytest.mark.parametrize(
    ("names", "short"),
    [
        (None, None),
        (["GPU:0", "GPU:1"], ("GPU:0", "GPU:1")),
        (("/device:GPU:1",), ("GPU:1",)),
        (["/gpu:2", "cpu:0"], ("GPU:2", "CPU:0")),
    ],
)
def test_devices_may_be_named_as_in_tensorflow(names, short):
    assert checked_device_names(names) == short


@pytest.mark.parametrize("names", ["GPU:0", 2, [0, 1], {"GPU:0": 1}])
def test_what_is_no_list_of_names_of_devices_is_refused(names):
    with pytest.raises(TypeError, match="`worker_devices` is not a list of names") as caught:
        checked_device_names(names)
    assert f"Received: worker_devices={names!r}." in str(caught.value)


@pytest.mark.parametrize(
    "names", [[], ["GPU:0", "/gpu:0"], ["first"], [""], ["/job:worker/task:0/device:GPU:0"]]
)
def test_names_that_are_those_of_no_devices_are_refused(names):
    with pytest.raises(ValueError, match="at least one and each once") as caught:
        checked_device_names(names)
    assert f"Received: worker_devices={names!r}." in str(caught.value)


@pytest.mark.parametrize(
    ("names", "wanted", "devices"),
    [
        (["CPU:0"], None, ("CPU:0",)),
        (["CPU:0", "CPU:1"], None, ("CPU:0",)),
        (["CPU:0", "XLA_CPU:0"], None, ("CPU:0",)),
        (["CPU:0", "GPU:0"], None, ("GPU:0",)),
        (["CPU:0", "GPU:0", "GPU:1"], None, ("GPU:0", "GPU:1")),
        (["CPU:0", "GPU:0", "GPU:1"], ("GPU:1",), ("GPU:1",)),
        (["CPU:0", "GPU:0", "GPU:1"], ("GPU:1", "GPU:0"), ("GPU:1", "GPU:0")),
        (["CPU:0", "GPU:0"], ("CPU:0",), ("CPU:0",)),
        # Of a worker that came later: what it has of them, else one device.
        (["CPU:0", "GPU:0"], ("GPU:0", "GPU:1"), ("GPU:0",)),
        (["CPU:0"], ("GPU:0", "GPU:1"), ("CPU:0",)),
        (["CPU:0", "GPU:0", "GPU:1"], ("GPU:2",), ("GPU:0",)),
        ([], None, ("CPU:0",)),
    ],
)
def test_a_worker_computes_on_its_gpus_or_on_what_was_chosen(names, wanted, devices):
    assert compute_devices(names, wanted) == devices


@pytest.mark.parametrize("value", ["0", "two", "-1", ""])
def test_a_worker_has_a_number_of_cpu_devices(monkeypatch, value):
    monkeypatch.setenv("KERASPS_CPU_DEVICES", value)
    with pytest.raises(ClusterConfigError, match=f"Received: '{value}'"):
        _cpu_devices()
