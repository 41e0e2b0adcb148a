"""Trains on a cluster of its own while tasks are killed, once for each scenario that is named, one
after the other; run as a process of its own by test_faults.py.

    python tests/processes/faulty_training.py worker_gone:7 evaluate_worker_gone:3 ps_gone:5

The number is that of the steps per execution. After a scenario all workers are started again, and
taken back, and the next one has a model of its own; a ps is not: what loses one comes last. Prints
one JSON line, of each scenario: History, iterations, and the error if there was one.
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import threading
import warnings
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from scenario import print_report

import kerasps
from kerasps.training.sessions.session_runner import SessionRunner
from support import unit_gradients
from support.gates import wait_while_exists
from support.process_checks import wait_for
from support.spread import spread

NUM_EXAMPLES = 2000
# Batches that a worker reads before the gate of a scenario in which results are held.
NUM_BEFORE_GATE = 60


def arrays():
    ids = np.arange(NUM_EXAMPLES, dtype="float32")
    return np.stack([np.sin(ids), np.cos(ids)], 1), ids[:, None]


def dataset_of(finite, looks_up, is_held):
    """Return what makes the data of a scenario."""

    def held(index, batch):
        with tf.control_dependencies([wait_while_exists(gate, index >= NUM_BEFORE_GATE)]):
            return tf.nest.map_structure(tf.identity, batch)

    def dataset_fn(context):
        dataset = part_of(context, finite, looks_up)
        return dataset.enumerate().map(held) if is_held else dataset

    return dataset_fn


def part_of(context, finite, looks_up):
    dataset = tf.data.Dataset.from_tensor_slices(arrays())
    dataset = dataset.shard(context.num_input_pipelines, context.input_pipeline_id)
    if looks_up:
        dataset = dataset.map(lambda x, y: (tf.strings.as_string(tf.cast(y, tf.int64)), y))
    return dataset.batch(8) if finite else dataset.repeat().batch(8)


def whole():
    """A dataset that each worker reads, in an order that it leaves to chance."""
    parts = tf.data.Dataset.range(20).shuffle(20)
    rows = tf.data.Dataset.from_tensor_slices(arrays())
    parts = parts.interleave(
        lambda i: rows.shard(20, i).shuffle(30), 4, num_parallel_calls=2, deterministic=False
    )
    return parts.shuffle(500).batch(8)


class Batches(keras.metrics.Metric):
    def __init__(self):
        super().__init__(name="batches")
        self.count = self.add_variable((), "zeros", name="count")
        self.ids = self.add_variable((), "zeros", dtype="int64", name="ids")
        self.squares = self.add_variable((), "zeros", dtype="int64", name="squares")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.count.assign_add(1.0)
        ids = tf.cast(y_true, tf.int64)
        self.ids.assign_add(tf.reduce_sum(ids))
        self.squares.assign_add(tf.reduce_sum(ids * ids))

    def result(self):
        return {
            "batches": self.count.value * 1,
            "ids": self.ids.value * 1,
            "squares": self.squares.value * 1,
        }


class Slow(keras.layers.Layer):
    """Makes a step take about a millisecond, so that a kill falls into one."""

    def call(self, x):
        matrix = tf.ones([250, 250]) * tf.reduce_mean(x) * 0.0
        for _ in range(4):
            matrix = tf.linalg.matmul(matrix, matrix)
        return x + matrix[0, 0]


class At(keras.callbacks.Callback):
    """Does something once at least `batch` batches of an epoch are done."""

    def __init__(self, epoch, batch, action):
        super().__init__()
        self.wanted, self.batch, self.action, self.epoch = epoch, batch, action, None

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if self.action is not None and self.epoch == self.wanted and batch >= self.batch:
            action, self.action = self.action, None
            action()


class AtStep(keras.callbacks.Callback):
    """Does something once at least `batch` batches of `evaluate` or `predict` are done."""

    def __init__(self, batch, action):
        super().__init__()
        self.batch, self.action = batch, action

    def on_test_batch_end(self, batch, logs=None):
        if self.action is not None and batch >= self.batch:
            action, self.action = self.action, None
            action()

    on_predict_batch_end = on_test_batch_end


class Meanwhile(keras.callbacks.Callback):
    """Does something once the ps count so many steps, and then opens the gate in the data.

    Hears of no batches, so workers hold their results.
    """

    def __init__(self, steps, action):
        super().__init__()
        self.steps, self.action = steps, action

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 0:
            gate.touch()
            threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self):
        iterations = self.model.optimizer.iterations.storage
        wait_for(lambda: int(iterations.read_value()) >= self.steps, what="steps that are held")
        self.action()
        gate.unlink()


# The training gives up when nobody has taken a step for so long.
TIMEOUTS_S = {"holding_all_workers_gone": "30"}


def kill_and_restart(cluster):
    cluster.kill("worker", 1)
    restarts.append(threading.Timer(1.0, cluster.restart, ["worker", 1]))
    restarts[-1].start()


class OnceBack(keras.callbacks.Callback):
    """Holds the start of an epoch until the coordinator has taken worker 1 back.

    TensorFlow's coordinator takes workers back when all can be reached. Were worker 0 killed
    before, worker 1 would have to wait for it.
    """

    def __init__(self, epoch):
        super().__init__()
        self.epoch = epoch

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == self.epoch:
            worker = strategy.coordinator._cluster.workers[1]
            wait_for(lambda: not worker._is_dead_with_error, what="worker 1, back again")


def error_of_saving(model):
    """What saving a checkpoint ends in."""
    with tempfile.TemporaryDirectory() as directory:
        try:
            tf.train.Checkpoint(model=model).save(f"{directory}/checkpoint")
        except Exception as exc:
            return f"{type(exc).__name__}: {exc}"
    return "saved"


def actions_of(scenario, killed):
    """The callbacks that kill somebody; `killed` gets the ps."""

    def kill_ps():
        cluster.kill("ps", 1)
        killed.append("ps 1")

    def kill_all_workers():
        cluster.kill("worker", 0)
        cluster.kill("worker", 1)

    return {
        "worker_restarted": [At(0, 20, lambda: kill_and_restart(cluster))],
        "lookup_worker_restarted_then_gone": [
            At(0, 20, lambda: kill_and_restart(cluster)),
            OnceBack(2),
            At(2, 20, lambda: cluster.kill("worker", 0)),
        ],
        "worker_gone": [At(0, 20, lambda: cluster.kill("worker", 1))],
        "ps_gone": [At(0, 20, kill_ps)],
        "holding_worker_restarted": [Meanwhile(100, lambda: kill_and_restart(cluster))],
        "holding_worker_gone": [Meanwhile(100, lambda: cluster.kill("worker", 1))],
        "holding_all_workers_gone": [Meanwhile(100, kill_all_workers)],
        "holding_ps_gone": [Meanwhile(100, kill_ps)],
        "holding_worker_restarted_finite": [Meanwhile(100, lambda: kill_and_restart(cluster))],
        "worker_restarted_finite_whole": [At(0, 20, lambda: kill_and_restart(cluster))],
        "new_ids_worker_restarted_finite": [At(0, 20, lambda: kill_and_restart(cluster))],
        "worker_gone_finite": [At(0, 20, lambda: cluster.kill("worker", 1))],
        "evaluate_worker_gone": [AtStep(20, lambda: cluster.kill("worker", 1))],
        "predict_worker_restarted": [AtStep(20, lambda: kill_and_restart(cluster))],
    }[scenario]


def make_counting_model(steps_per_execution):
    """A model with a row for each word, without a vocabulary; the rows count their updates."""
    with strategy.scope():
        words = keras.layers.Input((1,), dtype="string")
        tables = [
            kerasps.layers.DynamicEmbedding(3, "zeros"),
            kerasps.layers.DynamicEmbedding(3, "zeros", admission=kerasps.layers.CountAdmission(2)),
        ]
        rows = keras.layers.Add()([keras.layers.Flatten()(table(words)) for table in tables])
        model = keras.Model(words, Slow()(rows))
        model.compile(
            keras.optimizers.SGD(1.0),
            unit_gradients.Outputs(reduction="sum"),
            metrics=[Batches()],
            steps_per_execution=steps_per_execution,
        )
    return model


def make_model(looks_up, steps_per_execution):
    with strategy.scope():
        if looks_up:  # predicts the number in a word, which it does not unlearn
            lookup = keras.layers.StringLookup(
                vocabulary=[str(i) for i in range(NUM_EXAMPLES)], num_oov_indices=0
            )
            embedding = keras.layers.Embedding(NUM_EXAMPLES, 1)
            layers = [
                keras.Input((1,), dtype="string"),
                lookup,
                embedding,
                keras.layers.Flatten(),
                Slow(),
            ]
        else:
            layers = [keras.Input((2,)), Slow(), keras.layers.Dense(4), keras.layers.Dense(1)]
        model = keras.Sequential(layers)
        if looks_up:
            embedding.embeddings.assign(arrays()[1])
        model.compile(
            keras.optimizers.SGD(0.0 if looks_up else 0.001),
            "mae",
            metrics=[Batches()],
            steps_per_execution=steps_per_execution,
        )
    return model


def train(scenario, model, actions, report):
    """Call the methods of a scenario, and note what came of them."""
    finite, looks_up = "finite" in scenario, scenario.startswith(("lookup", "new_ids"))
    if scenario.startswith("evaluate"):
        report["expected"] = model.evaluate(*arrays(), batch_size=8, verbose=0, return_dict=True)
        report["logs"] = model.evaluate(
            *arrays(), batch_size=8, verbose=0, return_dict=True, callbacks=actions
        )
    if scenario.startswith("predict"):
        expected = model.predict(arrays()[0], batch_size=8, verbose=0)
        actual = model.predict(arrays()[0], batch_size=8, verbose=0, callbacks=actions)
        report["rows"] = len(actual)
        report["difference"] = float(np.abs(actual - expected).max())
    if scenario.startswith(("evaluate", "predict")):
        actions = []  # and the strategy goes on to train
    length = (
        {"epochs": 2}
        if finite
        else {"epochs": 2, "steps_per_epoch": 600}
        if "holding" in scenario
        else {"epochs": 4, "steps_per_epoch": 120}
    )
    data = (
        whole()
        if "whole" in scenario
        else kerasps.DatasetCreator(dataset_of(finite, looks_up, "holding" in scenario))
    )
    history = model.fit(data, **length, verbose=0, callbacks=actions)
    report["history"] = history.history
    if scenario == "worker_gone_finite":
        report["ids_without_worker"] = model.evaluate(
            *arrays(), batch_size=8, verbose=0, return_dict=True
        )["ids"]
    report["iterations"] = int(model.optimizer.iterations.numpy())
    if scenario.startswith("new_ids"):
        report["tables"] = [
            {
                "counts": np.unique(-np.concatenate([r for _, r in table.items()])).tolist(),
                **table.figures(),
            }
            for table in model.layers
            if isinstance(table, kerasps.layers.DynamicEmbedding)
        ]
        return
    report["finite_weights"] = bool(all(np.isfinite(w).all() for w in model.get_weights()))


def report_of(scenario, steps_per_execution):
    report, killed = {}, []
    lost_sessions.clear()
    if scenario.startswith("new_ids"):
        model = make_counting_model(steps_per_execution)
    else:
        model = make_model(scenario.startswith("lookup"), steps_per_execution)
    if scenario in TIMEOUTS_S:
        os.environ["KERASPS_WORKER_TIMEOUT"] = TIMEOUTS_S[scenario]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            train(scenario, model, actions_of(scenario, killed), report)
        except Exception as exc:
            report["error"] = type(exc).__name__
            report["text"] = str(exc)
            if killed:
                report["saving"] = error_of_saving(model)
    os.environ.pop("KERASPS_WORKER_TIMEOUT", None)
    report["failures"] = len(lost_sessions)
    report["warnings"] = [str(w.message) for w in caught]
    return report


def bring_workers_back():
    """Start those that are gone, and wait until steps go to all."""
    for restart in restarts:
        restart.join()
    for index in range(2):
        if cluster.processes["worker", index].has_ended():
            cluster.restart("worker", index)
    wait_for(
        lambda: all(worker.status == "connected" for worker in strategy.workers()),
        what="the connection to all workers",
    )


restarts, lost_sessions = [], []
session = SessionRunner.run


def noted_session(*args):
    try:
        session(*args)
    except BaseException as exc:
        lost_sessions.append(exc)
        raise


SessionRunner.run = noted_session
# So that the ps that is killed holds some of the variables.
spread()

with (
    tempfile.TemporaryDirectory() as folder,
    kerasps.LocalCluster(num_workers=2, num_ps=2) as cluster,
):
    gate = Path(folder) / "gate"
    strategy = kerasps.ParameterServerStrategy(cluster.cluster_resolver, table_min_bytes=0)
    reports = {}
    for argument in sys.argv[1:]:
        if reports:
            bring_workers_back()
        # Variables of the model before are gone, so those of the next one are spread over both ps.
        gc.collect()
        scenario, _, steps = argument.partition(":")
        reports[scenario] = report_of(scenario, int(steps))
        print(f"{scenario} is over", flush=True)
    print_report(reports)
