"""Workers come and go while one `fit` runs: stopped, told to leave, killed, moved, added.

Prints a line of JSON with what was seen; `test_members.py` says what is expected. The weight counts
its updates, and a table the ids of each pass.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
import time
from pathlib import Path
from tempfile import TemporaryDirectory

os.environ.update(KERAS_BACKEND="tensorflow", KERASPS_HANG_TIMEOUT="20")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf
from scenario import print_report

import kerasps
from kerasps.cluster.description.cluster_description import ClusterDescription
from kerasps.cluster.processes.process import TaskProcess, child_environment
from support.process_checks import wait_for

STEPS, BATCH = 4000, 2
SAYS_WHAT_IS_MADE_READY = {
    "TF_CPP_VMODULE": "process_function_library_runtime=1",
    "TF_CPP_MIN_LOG_LEVEL": "0",
}
SEEN: dict = {"in_turn": []}


class Counting(keras.Model):
    """One weight that each step adds one to, and how often each id was seen."""

    def __init__(self):
        super().__init__()
        self.count = self.add_weight(shape=(), initializer="zeros")
        self.ids = self.add_weight(shape=(STEPS * BATCH,), initializer="zeros", trainable=False)
        self.built = True

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = -self.count
        self.optimizer.apply(tape.gradient(loss, [self.count]), [self.count])
        ones = tf.ones_like(data, tf.float32)
        self.ids.assign_add(tf.math.unsorted_segment_sum(ones, data, STEPS * BATCH))
        slow = tf.reduce_sum(tf.random.normal((150, 150)) @ tf.random.normal((150, 150)))
        return {"batches": 1.0 + 0.0 * slow}


class Resolver(tf.distribute.cluster_resolver.SimpleClusterResolver):
    """Knows where the tasks are now."""

    def __init__(self, jobs):
        self.jobs = jobs
        super().__init__(self.cluster_spec(), task_type="chief", task_id=0, rpc_layer="grpc")

    def cluster_spec(self):
        return tf.train.ClusterSpec({job: list(tasks) for job, tasks in self.jobs.items()})


class Tasks:
    """The processes of the cluster, each started by itself."""

    def __init__(self, folder, num_workers, num_ps):
        self.folder = Path(folder)
        self.jobs = {
            "chief": [self.address()],
            "worker": [self.address() for _ in range(num_workers)],
            "ps": [self.address() for _ in range(num_ps)],
        }
        self.processes = {}
        for job in ("worker", "ps"):
            for index in range(len(self.jobs[job])):
                self.start(job, index)

    @staticmethod
    def address():
        with socket.socket() as holder:
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.bind(("127.0.0.1", 0))
            return f"127.0.0.1:{holder.getsockname()[1]}"

    def steps_made_ready(self, worker):
        """The names of the step graphs that a worker has made ready, each time that it did so."""
        log = (self.folder / f"worker-{worker}.log").read_text()
        return re.findall(
            r'Instantiating MultiDevice function "(\w*(?:into_totals|on_worker)\w*)"', log
        )

    def start(self, job, index):
        jobs = {name: tuple(tasks) for name, tasks in self.jobs.items()}
        process = TaskProcess(
            ClusterDescription(jobs, job, index),
            log_file=self.folder / f"{job}-{index}.log",
            env={**child_environment(os.environ), **SAYS_WHAT_IS_MADE_READY},
        )
        process.start()
        self.processes[job, index] = process
        return process


def attack(strategy, tasks, model, is_over):
    def status(worker):
        workers = strategy.workers()
        return workers[worker].status if worker < len(workers) else None

    def until(what, condition):
        wait_for(lambda: condition() or is_over.is_set(), what=what)
        SEEN["in_turn"].append(what)

    def goes_on(seconds=0.5):
        """Steps are done, for so long at least."""
        before = int(model.optimizer.iterations)
        time.sleep(seconds)
        wait_for(lambda: int(model.optimizer.iterations) > before or is_over.is_set())

    def is_there():
        return status(1) == "connected"

    # Asleep.
    process = tasks.processes["worker", 1]
    os.kill(process.pid, signal.SIGSTOP)
    # By the watch, or by a ping that ends a call.
    until("noticed", lambda: status(1) != "connected")
    goes_on()
    SEEN["in_turn"].append("others go on")
    os.kill(process.pid, signal.SIGCONT)
    until("awake", is_there)
    # Told to leave.
    goes_on()
    os.kill(process.pid, signal.SIGTERM)
    until("left", process.has_ended)
    SEEN["exit_code"] = process.poll()
    SEEN["left"] = status(1)
    process.start()
    wait_for(process.is_ready)
    until("new", is_there)
    # Killed, and started anew; the other is stopped just then.
    goes_on()
    process.kill()
    process.start()
    wait_for(process.is_ready)
    until("back", is_there)
    # Killed, and started at another address.
    goes_on()
    process.kill()
    tasks.jobs["worker"][1] = tasks.address()
    process = tasks.start("worker", 1)
    wait_for(process.is_ready)
    until(
        "moved",
        lambda: is_there() and strategy.workers()[1].address == tasks.jobs["worker"][1],
    )
    # One that was not there.
    tasks.jobs["worker"].append(tasks.address())
    wait_for(tasks.start("worker", 2).is_ready)
    until("joined", lambda: status(2) == "connected")
    # It takes over some of what the others read, in this pass or, where little is left, the next.
    until("helps", lambda: tasks.steps_made_ready(2))
    # And the place of one that is gone for good.
    process.kill()
    until("gone", lambda: status(1) == "lost")
    SEEN["was_running"] = not is_over.is_set()


def main():
    with TemporaryDirectory() as folder:
        tasks = Tasks(folder, num_workers=2, num_ps=2)
        strategy = kerasps.ParameterServerStrategy(Resolver(tasks.jobs))
        with strategy.scope():
            model = Counting()
            model.compile(keras.optimizers.SGD(1.0), steps_per_execution=4)
        data = np.arange(STEPS * BATCH, dtype=np.int32)
        is_over = threading.Event()
        thread = threading.Thread(target=attack, args=[strategy, tasks, model, is_over])
        passes, losses = 0, []

        class Watch(keras.callbacks.Callback):
            def on_epoch_begin(self, epoch, logs=None):
                if epoch == 1:
                    thread.start()

            def on_epoch_end(self, epoch, logs=None):
                nonlocal passes
                passes += 1
                counts = model.ids.numpy()
                exact = float(model.count) == int(model.optimizer.iterations) == passes * STEPS
                losses.append(exact and counts.min() == counts.max() == passes)
                self.model.stop_training = epoch > 1 and not thread.is_alive()

        model.fit(
            tf.data.Dataset.from_tensor_slices(data).batch(BATCH),
            epochs=1_000_000,
            verbose=0,
            callbacks=[Watch()],
        )
        is_over.set()
        thread.join()
        SEEN["workers"] = [worker.status for worker in strategy.workers()]
        SEEN["exact"], SEEN["passes"] = all(losses), passes
        names = tasks.steps_made_ready(0)
        SEEN["made_ready"], SEEN["made_ready_again"] = len(names), len(names) - len(set(names))
        print_report(SEEN)
        for process in tasks.processes.values():
            process.kill()
        os._exit(0)


if __name__ == "__main__":
    main()
