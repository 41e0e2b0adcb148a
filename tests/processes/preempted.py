"""TensorFlow's own tests of losses under this strategy, for `model.fit`, one after the other.

They are those of `tensorflow/python/distribute/coordinator/fault_tolerance_test_base.py`. Where
that one asserts that at least so many steps were done, here it is exactly so many. Prints a line of
JSON; `test_preempted.py` says what is expected.
"""

from __future__ import annotations

import os
import threading
import time

os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import tensorflow as tf
from scenario import print_report

import kerasps

STEPS = 60


class Counting(keras.Model):
    """One weight that each step adds one to."""

    def __init__(self):
        super().__init__()
        self.count = self.add_weight(shape=(), initializer="zeros")
        self.built = True

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = -self.count
        self.optimizer.apply(tape.gradient(loss, [self.count]), [self.count])
        return {"sum": tf.reduce_sum(data)}

    def test_step(self, data):
        return {"sum": tf.reduce_sum(data)}


class AtBatch(keras.callbacks.Callback):
    """Does something once, when so many batches are done."""

    def __init__(self, batch, action):
        super().__init__()
        self.batch, self.action = batch, action

    def on_train_batch_end(self, batch, logs=None):
        if self.action is not None and batch >= self.batch:
            action, self.action = self.action, None
            action()


def slow(step):
    """A batch that takes a few milliseconds to read."""
    work = tf.reduce_sum(tf.random.normal((300, 300)) @ tf.random.normal((300, 300)))
    return tf.cast(step, tf.float32) * 0.0 + 1.0 + 0.0 * work


class Run:
    def __init__(self):
        self.cluster = kerasps.LocalCluster(num_workers=2, num_ps=1)
        self.strategy = kerasps.ParameterServerStrategy(self.cluster.cluster_resolver)
        with self.strategy.scope():
            self.model = Counting()
            self.model.compile(keras.optimizers.SGD(1.0), steps_per_execution=3)
        self.done = 0

    def data(self, function=slow):
        return tf.data.Dataset.range(STEPS).map(function)

    def fit(self, *callbacks, data=None):
        """Train; return whether everything adds up."""
        self.model.fit(
            self.data() if data is None else data, verbose=0, callbacks=[*callbacks], epochs=2
        )
        self.done += 2 * STEPS
        return self.is_exact()

    def is_exact(self):
        return float(self.model.count) == int(self.model.optimizer.iterations) == self.done

    def restart(self, *workers, after=0.5):
        for worker in workers:
            self.cluster.kill("worker", worker)
        time.sleep(after)
        for worker in workers:
            self.cluster.restart("worker", worker)

    def later(self, action):
        thread = threading.Thread(target=action)
        thread.start()
        return thread


def main():
    run, seen = Run(), {}
    seen["nothing_lost"] = run.fit()
    run.restart(0)
    seen["between_two_fits"] = run.fit()
    seen["midst_of_fit"] = run.fit(AtBatch(10, lambda: run.later(lambda: run.restart(0))))
    # While the datasets are made: a pass begins when both are gone.
    thread = run.later(lambda: run.restart(0, 1, after=1.0))
    time.sleep(0.2)
    seen["while_data_are_made"] = run.fit()
    thread.join()
    seen["both_workers"] = run.fit(AtBatch(10, lambda: run.later(lambda: run.restart(0, 1))))

    def again_and_again():
        for _ in range(3):
            run.restart(0, after=0.3)

    thread = None

    def begin():
        nonlocal thread
        thread = run.later(again_and_again)

    seen["again_and_again"] = run.fit(AtBatch(5, begin))
    thread.join()
    # An error of the user's own while a worker is lost is that error, and leaves all well.
    run.later(lambda: run.restart(1)).join()

    def wrong(step):
        with tf.control_dependencies([tf.debugging.assert_less(step, tf.constant(20, tf.int64))]):
            return slow(step)

    before = int(run.model.optimizer.iterations)
    try:
        run.model.fit(
            run.data(wrong),
            verbose=0,
            callbacks=[AtBatch(3, lambda: run.cluster.kill("worker", 0))],
        )
    except tf.errors.InvalidArgumentError as exc:
        seen["own_error"] = "assert" in str(exc)
    run.cluster.restart("worker", 0)
    run.done += int(run.model.optimizer.iterations) - before
    seen["fit_after_own_error"] = run.fit()
    # What was fetched stays when workers go; what asks them waits until they are back.
    thread = run.later(lambda: run.restart(0, 1, after=1.0))
    time.sleep(0.2)
    seen["weights_without_workers"] = float(run.model.count) == run.done
    seen["evaluate"] = run.model.evaluate(run.data(), verbose=0) == STEPS / STEPS
    thread.join()
    # A ps that goes while a worker is being taken back.
    run.cluster.kill("worker", 1)
    threading.Timer(0.3, lambda: run.cluster.kill("ps", 0)).start()
    threading.Timer(0.4, lambda: run.cluster.restart("worker", 1)).start()
    for name in ("ps_while_a_worker_comes_back", "ps_in_the_next_fit", "ps_in_evaluate"):
        try:
            if name == "ps_in_evaluate":
                run.model.evaluate(run.data(), verbose=0)
            else:
                run.model.fit(run.data().repeat(), steps_per_epoch=10**6, verbose=0)
        except kerasps.PSLostError as exc:
            seen[name] = exc.task_index == 0
    print_report(seen)
    os._exit(0)


if __name__ == "__main__":
    main()
