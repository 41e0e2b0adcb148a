"""What `CoordinatorPort` relies on, asked of TensorFlow's coordinator one thing after the other.

Prints a line of JSON per question; `test_coordinator_port.py` knows the answers.
"""

from __future__ import annotations

import json
import queue
import threading
import time

import tensorflow as tf
from scenario import local_strategy

from kerasps.training.calls.coordinator_port import CoordinatorPort
from kerasps.training.calls.worker_recovery import TryAgain, WorkerAbsent
from support.process_checks import wait_for


def tell(**answers):
    print("ANSWER", json.dumps(answers), flush=True)


def cluster_counter(strategy):
    with strategy.scope():
        variable = tf.Variable(0)

    @tf.function
    def count():
        return variable.assign_add(1)

    return count


def main():
    with local_strategy(2, 1) as (cluster, strategy):
        port, membership = CoordinatorPort(strategy.coordinator), strategy.extended.host.membership
        began = queue.SimpleQueue()
        go_on = threading.Event()

        def session(name):
            worker = port.worker_index()
            if not membership.has_worker(worker):
                raise WorkerAbsent
            began.put((name, worker, tf.constant(0).device))
            while not go_on.is_set():
                try:
                    tf.identity(tf.constant(0)).numpy()
                except tf.errors.OpError:
                    membership.lose(worker, "a call failed")
                    raise WorkerAbsent from None
                time.sleep(0.01)

        # Each worker has one session, on its device.
        for _ in range(2):
            port.start(session, "first")
        first = sorted([began.get() for _ in range(2)], key=lambda entry: entry[1])
        tell(workers=[e[1] for e in first], devices=[e[2] for e in first])

        # A session whose worker is killed is called again when the worker is back, and not before.
        cluster.kill("worker", 1)
        is_seen = wait_for(lambda: membership.absent_workers == {1})
        time.sleep(0.5)
        is_waiting = began.empty()
        cluster.restart("worker", 1)
        name, worker, _ = began.get()
        tell(is_seen=is_seen, is_waiting=is_waiting, again=[name, worker])
        go_on.set()
        strategy.coordinator.join()

        # One that is to try again does, at once.
        tries = []

        def trying():
            tries.append(port.worker_index())
            if len(tries) < 3:
                raise TryAgain

        port.start(trying)
        strategy.coordinator.join()
        tell(tries=len(tries))

        # A worker that has another thread takes sessions, while its old one waits for ever.
        for_ever, done = threading.Event(), queue.SimpleQueue()

        def waiting():
            done.put(port.worker_index())
            for_ever.wait()

        for _ in range(2):
            port.start(waiting)
        stuck = sorted(done.get() for _ in range(2))
        port.renew_worker(1)
        port.start(lambda: done.put(port.worker_index()))
        tell(stuck=stuck, renewed=done.get())
        for_ever.set()
        strategy.coordinator.join()

        # A worker that is added has a thread.
        index = cluster.add_worker()
        is_there = wait_for(lambda: membership.num_workers == 3 and membership.has_worker(index))
        port.add_workers(3)
        barrier = threading.Barrier(3)

        def together():
            barrier.wait()
            done.put((port.worker_index(), tf.identity(tf.constant(0)).device))

        for _ in range(3):
            port.start(together)
        devices = [device for _, device in sorted(done.get() for _ in range(3))]
        tell(is_there=is_there, devices=devices)

        # The coordinator is still usable by itself: a function whose worker dies goes elsewhere.
        counter = cluster_counter(strategy)
        results = [strategy.coordinator.schedule(counter) for _ in range(50)]
        cluster.kill("worker", 2)
        strategy.coordinator.join()
        tell(scheduled=len([int(result.fetch()) for result in results]))

        # A call that waits for ever ends when it is cancelled, and in no context of its own.
        ended = queue.SimpleQueue()
        with tf.device("/job:worker/replica:0/task:0"):
            begun, never = (
                tf.queue.FIFOQueue(1, [tf.float32], shapes=[[]], shared_name=name)
                for name in ("begun", "never")
            )

        @tf.function
        def wait_for_ever():
            with tf.control_dependencies([begun.enqueue(0.0)]):
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
            threading.Thread(target=port.cancellable(manager, call), daemon=True).start()
            begun.dequeue()
            is_waiting = ended.empty()
            manager.start_cancel()
            outcome = ended.get()
        tell(is_waiting=is_waiting, outcome=outcome)


if __name__ == "__main__":
    main()
