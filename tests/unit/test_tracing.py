"""Traces without a cluster: intervals, clocks, shares, the file, and bad arguments."""

from __future__ import annotations

import json
import random
import threading
import time
from concurrent import futures
from dataclasses import replace

import grpc
import keras
import numpy as np
import pytest
from grpc import _channel as grpc_channel

import kerasps
from kerasps.tools.tracing import clocks, intervals
from kerasps.tools.tracing.chrome_trace import ChromeTrace
from kerasps.tools.tracing.clocks import Asked, aligned
from kerasps.tools.tracing.limits import find_limits
from kerasps.tools.tracing.recording import Recording
from kerasps.tools.tracing.report import _chosen, new_run
from kerasps.tools.tracing.steps import OnPS, WorkerStep, find_steps
from kerasps.tools.tracing.task_events import Operation, TaskEvents


def test_intervals_are_sets_of_points():
    draw = random.Random(1)
    for _ in range(200):
        one, other = (
            [(b, b + draw.randrange(4)) for b in draw.choices(range(30), k=draw.randrange(6))]
            for _ in range(2)
        )
        points = [{p for b, e in spans for p in range(b, e)} for spans in (one, other)]
        sets = [intervals.union(spans) for spans in (one, other)]
        for found, expected in [
            (sets[0], points[0]),
            (intervals.both(*sets), points[0] & points[1]),
            (intervals.without(*sets), points[0] - points[1]),
        ]:
            assert {p for b, e in found for p in range(b, e)} == expected
            assert intervals.length(found) == len(expected)
            assert sorted(found) == found


def step(worker=0, **parts):
    """A step that pulls from 20 to 30, computes to 50 and pushes to 60."""
    made = WorkerStep(
        worker=worker,
        key=(1, "", 0),
        pull=(20, 30),
        compute=(30, 50),
        push=(50, 60),
        data=None,
        waited_from=0,
        execution=(0, 100),
        on_ps={},
    )
    return replace(made, **parts)


@pytest.mark.parametrize(
    ("parts", "activity", "sentence"),
    [
        ({"compute": (1, 50)}, "compute", "Worker 0 computes 82% of the time."),
        ({"data": (0, 30)}, "data", "Worker 0 waits for data 50% of the time."),
        (
            {"push": (32, 60), "compute": (30, 32), "waited_from": 20},
            "push",
            "Worker 0 packs and sends its pushes 70% of the time.",
        ),
        ({}, "pull", "Worker 0 waits for values from the ps 50% of the time."),
        (
            {"on_ps": {0: OnPS(push=(0, 3)), 1: OnPS(push=(0, 29), lock=(0, 28))}},
            "lock",
            "Worker 0 waits for the lock of ps 1 47% of the time.",
        ),
        (
            {"on_ps": {2: OnPS(push=(0, 29), lock=(0, 1))}},
            "update",
            "Worker 0 waits 47% of the time until ps 2 has applied its updates.",
        ),
        (
            {"execution": (28, 60)},
            "coordinator",
            "Worker 0 waits for the coordinator 47% of the time.",
        ),
    ],
)
def test_the_largest_share_makes_the_sentence(parts, activity, sentence):
    limits = find_limits([step(**parts)])
    shares = limits.shares[0]
    assert max(shares, key=shares.get) == activity
    assert sum(shares.values()) == pytest.approx(1)
    assert limits.sentence == sentence


def test_workers_that_wait_for_the_coordinator_are_given_a_remedy():
    limits = find_limits([step(execution=(28, 60))])
    assert "steps_per_execution=10 or more" in limits.remedy
    assert "some 47% of the time" in limits.remedy
    assert find_limits([step(execution=(28, 60))], has_coordinator=False).remedy == ""
    assert find_limits([step()]).remedy == ""
    # Longer executions would not end these waits.
    assert find_limits([step(execution=(28, 60))], execution_steps=10).remedy == ""
    assert find_limits([step(execution=(28, 60))], reads=[(0, 10), (5, 26)]).remedy == ""
    assert find_limits([step(execution=(28, 60)), step(worker=1)]).remedy == ""


def test_data_that_came_before_the_values_did_not_hold_the_step_up():
    shares = find_limits([step(pull=(5, 30), data=(0, 25))]).shares[0]
    assert shares["data"] == pytest.approx(5 / 60)
    assert shares["pull"] == pytest.approx(25 / 60)


def recorded(ahead_ms=0.0, ps_ahead_ms=0.0):
    """A worker that asks a ps, which takes 2 ms to answer; either way takes 1 ms."""
    ms = 1e6
    worker, ps = TaskEvents(begin=0, end=90 * ms), TaskEvents(begin=0, end=90 * ms)
    for number in range(5):
        at, names = number * 10 * ms, (f"pull/Ids/_{4 * number}", f"pull/Rows/_{4 * number + 2}")
        later = [f"{name[: name.rindex('_')]}_{int(name.rpartition('_')[2]) + 1}" for name in names]
        worker.operations.append(Operation(names[0], "_Send", at, at, 7))
        ps.waits.append(Operation(later[0], "_Recv", at - ms, at + ms, 7))
        ps.operations.append(Operation(names[1], "_Send", at + 3 * ms, at + 3 * ms, 7))
        worker.waits.append(Operation(later[1], "_Recv", at, at + 4 * ms, 7))
    return {
        ("worker", 0): clocks.moved(worker, ahead_ms * ms),
        ("ps", 0): clocks.moved(ps, ps_ahead_ms * ms),
    }


ASKED = {("worker", 0): Asked(-5e6, 95e6), ("ps", 0): Asked(-5e6, 95e6)}


@pytest.mark.parametrize(
    ("worker_ahead", "ps_ahead", "moved"),
    [
        (0, 0, (0, 0)),
        (0.5, -0.4, (0, 0)),  # no message contradicts it
        (0, 3, (0, -3)),
        (0, -500, (0, 500)),
        (3600_000, 0, (-3600_000, 0)),
        (-70, 40, (70, -40)),
    ],
)
def test_clocks_are_moved_to_where_messages_arrive_after_they_are_sent(
    worker_ahead, ps_ahead, moved
):
    events, moves = aligned(recorded(worker_ahead, ps_ahead), ASKED)
    assert (moves["worker", 0] / 1e6, moves["ps", 0] / 1e6) == pytest.approx(moved, abs=1e-6)
    worker, ps = events["worker", 0], events["ps", 0]
    for sender, receiver in ((worker, ps), (ps, worker)):
        pairs = zip(sender.operations, receiver.waits, strict=True)
        assert all(sent.begin < received.end for sent, received in pairs)


def operation(name, begin, end, kind="Op", execution=7):
    return Operation(name, kind, begin, end, execution)


def test_steps_in_a_loop_are_told_apart():
    worker = TaskEvents(begin=0, end=100, begun={7})
    for at in (0, 20, 40):
        worker.operations += [
            operation("while/body/pull/split", at + 5, at + 6),
            operation("while/body/compute_phase/MatMul", at + 6, at + 10),
            operation("while/body/push/concat/_1", at + 11, at + 12, kind="_Send"),
        ]
        worker.waits.append(operation("while/body/pull/Reply/_3", at, at + 5, kind="_Recv"))
    steps = find_steps({("worker", 0): worker})
    assert [found.compute for found in steps] == [(6, 10), (26, 30), (46, 50)]
    assert [found.push for found in steps] == [(10, 12), (30, 32), (50, 52)]
    assert [found.pull[1] for found in steps] == [5, 25, 45]


def test_an_execution_that_had_begun_before_is_left_out():
    worker = TaskEvents(begin=0, end=100)
    worker.operations = [operation("compute_phase/MatMul", 6, 10), operation("push/concat", 11, 12)]
    assert find_steps({("worker", 0): worker}) == []


def test_the_steps_that_are_chosen_begin_where_all_workers_have_some():
    steps = [step(worker=worker, waited_from=at) for at, worker in enumerate([0] * 5 + [1, 0] * 5)]
    assert _chosen(steps, 4) == steps[5:9]
    assert _chosen(steps, 12) == steps[3:15]
    assert _chosen(steps, 100) == _chosen(steps, None) == steps


def test_events_that_overlap_lie_in_lanes(tmp_path):
    trace = ChromeTrace(1000)
    for begin, end in [(1000, 5000), (2000, 3000), (3000, 6000), (5000, 7000)]:
        trace.add(1, "pull", "pull", (begin, end))
    trace.write(tmp_path / "trace.json", {})
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    slices = [(event["tid"], event["ts"], event["dur"]) for event in events if event["ph"] == "X"]
    assert slices == [(1, 0, 4), (2, 1, 1), (2, 2, 3), (1, 4, 2)]
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]


def test_each_recording_has_its_directory(tmp_path):
    runs = []
    for _ in range(3):
        runs.append(new_run(tmp_path))
        (tmp_path / "plugins/profile" / runs[-1]).mkdir(parents=True)
    assert len(set(runs)) == 3


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"log_dir": 3}, TypeError, "log_dir=3"),
        ({"first_step": -1}, ValueError, "first_step=-1"),
        ({"first_step": "1"}, TypeError, "first_step='1'"),
        ({"num_steps": 0}, ValueError, "num_steps=0"),
        ({"num_steps": True}, TypeError, "num_steps=True"),
    ],
)
def test_a_wrong_argument_is_named(arguments, error, message):
    with pytest.raises(error, match=message):
        kerasps.Trace(**{"log_dir": "logs"} | arguments)


def test_without_a_strategy_there_is_nothing_to_trace(tmp_path):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(kerasps.UnsupportedError, match="There are no tasks to trace"):
        model.fit(np.ones((4, 2)), np.ones(4), verbose=0, callbacks=[kerasps.Trace(tmp_path)])


class ClockOfWatcher:
    """Lets gRPC's thread that watches a connection go on when the channel is closed, or later."""

    def __init__(self):
        self.closed = threading.Event()

    def time(self):
        if "(_run)" in threading.current_thread().name:
            self.closed.wait(0.5)
        return time.time()

    def __getattr__(self, name):
        return getattr(time, name)


def test_a_channel_is_closed_when_nothing_watches_it(monkeypatch):
    clock, raised = ClockOfWatcher(), []
    close = grpc_channel.Channel.close

    def closing(channel):
        close(channel)
        clock.closed.set()

    monkeypatch.setattr(grpc_channel, "time", clock)
    monkeypatch.setattr(grpc_channel.Channel, "close", closing)
    monkeypatch.setattr(threading, "excepthook", lambda args: raised.append(args.exc_value))
    server = grpc.server(futures.ThreadPoolExecutor())
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    before = set(threading.enumerate())
    recording = Recording({("worker", 0): f"127.0.0.1:{port}"}, "session")
    recording.start()
    for thread in threading.enumerate():
        if thread.name == "kerasps-trace":
            thread.join()
    for thread in set(threading.enumerate()) - before:
        thread.join(2.0)
    server.stop(None).wait()
    assert raised == []
    assert list(recording.missing) == [("worker", 0)]
