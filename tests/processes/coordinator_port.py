"""What `CoordinatorPort` relies on, asked of TensorFlow's coordinator one thing after the other.

Prints a line of JSON per question; `test_coordinator_port.py` knows the answers.
"""

from __future__ import annotations

import json
import queue
import threading
import time

import tensorflow as tf

import kerasps
from kerasps.training.coordinator_port import CoordinatorPort


def tell(**answers):
    print("ANSWER", json.dumps(answers), flush=True)


def until(condition, seconds=60):
    """Wait for a condition; return whether it came true."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return bool(condition())


class Source:
    """What each worker is given."""


def main():
    with kerasps.LocalCluster(num_workers=2, num_ps=1) as cluster:
        strategy = kerasps.ParameterServerStrategy(cluster.cluster_resolver)
        port = CoordinatorPort(strategy.coordinator)
        with strategy.scope():
            variable = tf.Variable(1.0)
        began = queue.SimpleQueue()
        go_on = threading.Event()
        sources = port.create_per_worker(Source)

        def session(source, name):
            worker = port.worker_index()
            began.put((name, worker, source, tf.constant(0).device))
            while not go_on.is_set():
                tf.identity(variable)  # fails when the worker is lost
                time.sleep(0.01)

        # Each worker has one session, on its device, with its own source.
        for _ in range(2):
            port.start(session, sources, "first")
        first = sorted([began.get(timeout=30) for _ in range(2)], key=lambda entry: entry[1])
        tell(
            workers=[entry[1] for entry in first],
            devices=[entry[3] for entry in first],
            num_sources=len({id(entry[2]) for entry in first}),
            sources=sorted({type(entry[2]).__name__ for entry in first}),
            has_failed=port.has_failed,
            lost=sorted(port.lost_workers),
        )

        # A session whose worker is killed is called again when the worker is back, with a new one.
        cluster.kill("worker", 1)
        is_seen = until(lambda: port.lost_workers == {1})
        cluster.restart("worker", 1)
        name, worker, source, _ = began.get(timeout=60)
        tell(
            is_seen=is_seen,
            again=[name, worker],
            is_new=source is not first[1][2],
            lost=sorted(port.lost_workers),
            has_failed=port.has_failed,
        )
        go_on.set()
        strategy.coordinator.join()

        # An error that is none of a lost worker is known at once, while another session goes on.
        go_on.clear()
        is_going_on = threading.Event()

        def failing(source, name):
            if port.worker_index() == 0:
                is_going_on.wait(30)
                raise ValueError("of the user's own")
            is_going_on.set()
            go_on.wait(30)

        for _ in range(2):
            port.start(failing, sources, "failing")
        is_known = until(lambda: port.has_failed)
        is_still_going = not go_on.is_set()
        go_on.set()
        try:
            port.raise_error()
            raised = None
        except ValueError as exc:
            raised = str(exc)
        done = threading.Event()
        port.start(lambda source: done.set(), sources)
        tell(
            is_known=is_known,
            is_still_going=is_still_going,
            raised=raised,
            has_failed=port.has_failed,
            takes_sessions=done.wait(30),
        )

        # Reports of a lost ps are counted, and forgotten.
        port._tf_cluster._potential_ps_failures_count[0] = 5
        port.forget_ps_reports()
        tell(reports=list(port._tf_cluster._potential_ps_failures_count))

        # A call that waits for ever ends when it is cancelled, and in no context of its own.
        with strategy.scope():
            pass
        ended = queue.SimpleQueue()
        with tf.device("/job:worker/replica:0/task:0"):
            never = tf.queue.FIFOQueue(1, [tf.float32], shapes=[[]], shared_name="never")

        @tf.function
        def wait_for_ever():
            return never.dequeue()

        waiting = wait_for_ever.get_concrete_function()

        def call():
            try:
                with tf.device("/job:worker/replica:0/task:0"):
                    waiting()
                ended.put("returned")
            except tf.errors.OpError as exc:
                ended.put(type(exc).__name__)

        with port.cancellable_calls() as manager:
            threading.Thread(target=call, daemon=True).start()
            time.sleep(0.5)
            is_waiting = ended.empty()
            manager.start_cancel()
            outcome = ended.get(timeout=30)
        tell(is_waiting=is_waiting, outcome=outcome)

        # A ps that is lost is known while sessions wait, without anyone joining them.
        go_on.clear()

        def reading(source):
            while not go_on.is_set():
                with tf.device("/job:worker/replica:0/task:0"):
                    tf.identity(variable).numpy()
                time.sleep(0.01)

        port.start(reading, sources)
        time.sleep(0.2)
        cluster.kill("ps", 0)
        is_known = until(lambda: port.has_failed)
        go_on.set()
        try:
            port.raise_error()
            raised = None
        except Exception as exc:
            raised = isinstance(exc, (tf.errors.UnavailableError, tf.errors.AbortedError))
        tell(is_known=is_known, is_of_lost_ps=raised)


if __name__ == "__main__":
    main()
