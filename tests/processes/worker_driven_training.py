"""A worker that drives its own steps, as TF_CONFIG says; run by test_worker_driven.py.

The first argument says what it does, the second names a directory for what tests look at.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from scenario import print_report

import kerasps
from support import unit_gradients
from support.compare import assert_equal, dataset, regression_data, train_both
from support.models import counting_model
from support.predicted_rows import INPUTS, check_predict, numbering_model
from support.process_checks import wait_for
from support.spread import spread
from support.unit_gradients import compiled_unit_model

HERE = Path(sys.argv[2])
EPOCHS, STEPS, BATCH_SIZE = 3, 20, 8
# Of the ids that `Examples` adds up.
IDS = np.arange(640)


def tell(name, **values):
    """Writes a file for the test, whole or not at all."""
    new = HERE / f"{name}.new"
    new.write_text(json.dumps(values))
    new.rename(HERE / name)


def wait_for_file(name):
    wait_for((HERE / name).exists, what=name)


def ids(context):
    """The worker's share of examples whose targets are their numbers."""
    y = IDS[context.input_pipeline_id :: context.num_input_pipelines]
    x = np.stack([y, y], 1).astype("float32") / 640
    return tf.data.Dataset.from_tensor_slices((x, y.astype("float32"))).batch(BATCH_SIZE)


def endless(context):
    return ids(context).repeat()


def equal():
    """One worker is plain Keras, with shards and a table, whatever the steps per execution."""
    strategy = kerasps.WorkerDrivenStrategy(
        variable_partitioner=kerasps.FixedShardsPartitioner(2, min_bytes=0),
        sparse_updates="dense",
        table_min_bytes=0,
    )
    _, y = regression_data()
    x = np.random.default_rng(1).integers(0, 50, size=(len(y), 3))
    report = {}
    for steps_per_execution in (1, 10):

        def make_model(steps_per_execution=steps_per_execution):
            inputs = keras.Input((3,), dtype="int32")
            hidden = keras.layers.Flatten()(keras.layers.Embedding(50, 8)(inputs))
            hidden = keras.layers.Dense(16, activation="tanh")(hidden)
            hidden = keras.layers.Dropout(0.2)(keras.layers.BatchNormalization()(hidden))
            model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
            model.compile("adam", "mse", metrics=["mae"], steps_per_execution=steps_per_execution)
            return model

        plain, ours = train_both(
            strategy, make_model, (x, y), steps=20, epochs=2, sum_repeated_ids=True
        )
        assert_equal(plain, ours)
        for name, values in plain.history.history.items():
            np.testing.assert_allclose(ours.history.history[name], values, rtol=1e-5)
        shards = [len(weight.shards) for weight in ours.trainable_weights]
        report[steps_per_execution] = [int(ours.optimizer.iterations.numpy()), max(shards)]
    whole = dataset((x, y)).take(20)
    expected = plain.evaluate(whole, verbose=0)
    np.testing.assert_allclose(ours.evaluate(whole, verbose=0), expected, rtol=1e-5)
    rows = ours.predict(x[:50], batch_size=16, verbose=0)
    np.testing.assert_allclose(rows, plain.predict(x[:50], verbose=0), rtol=1e-4, atol=1e-5)
    with strategy.scope():
        numbering = numbering_model(3)
    for name in INPUTS:
        check_predict(numbering, name)
        check_predict(numbering, name, steps=11)
    check_predict(numbering, "dataset", stop_after=7)
    ours.save(HERE / "model.keras")
    loaded = keras.models.load_model(HERE / "model.keras")
    report["saved"] = all(map(np.array_equal, loaded.get_weights(), ours.get_weights()))
    report["refused"] = refused(strategy, ours, x, y)
    print_report(report)


def refused(strategy, model, x, y):
    """The messages of what does not go."""
    messages = {}
    backup = keras.callbacks.BackupAndRestore(HERE / "backup")
    for name, call in (
        ("backup", lambda: model.fit(x, y, callbacks=[backup], verbose=0)),
        ("coordinator", lambda: strategy.coordinator),
        ("workers", strategy.workers),
        ("run", lambda: strategy.run(print)),
    ):
        try:
            call()
        except kerasps.UnsupportedError as exc:
            messages[name] = str(exc)
    model.compile("adam", "mse", run_eagerly=True)
    try:
        model.fit(x, y, verbose=0)
    except kerasps.UnsupportedError as exc:
        messages["eagerly"] = str(exc)
    return messages


def counts():
    """Steps of all are counted, in the optimizer and in the chief's metrics."""
    strategy = kerasps.WorkerDrivenStrategy()
    index = strategy.worker_index
    with strategy.scope():
        bare = tf.Variable([float(index + 5)], name="bare")
    model = counting_model(strategy, steps_per_execution=2)
    with strategy.scope():
        numbering = numbering_model()
    if strategy.is_chief:
        model.layers[-1].bias.assign([7.0])
    else:
        model.layers[-1].bias.assign([9.0])  # the chief's word holds
    biases = [model.layers[-1].bias.numpy().tolist()] if strategy.is_chief else []

    class WaitForOthers(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if strategy.is_chief and epoch == EPOCHS - 1:
                for worker in range(1, strategy.num_workers):
                    wait_for_file(f"fit-{worker}")

    history = model.fit(
        kerasps.DatasetCreator(endless),
        epochs=EPOCHS,
        steps_per_epoch=STEPS,
        verbose=0,
        callbacks=[WaitForOthers(), keras.callbacks.CSVLogger(HERE / f"log-{index}.csv")],
    )
    tell(f"fit-{index}", iterations=int(model.optimizer.iterations.numpy()))

    class WaitAtTheEnd(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if strategy.is_chief and batch == self.params["steps"] - 1:
                for worker in range(1, strategy.num_workers):
                    wait_for_file(f"report-{worker}")

    zeros = np.zeros((len(IDS), 2), "float32")
    examples = tf.data.Dataset.from_tensor_slices((zeros, IDS.astype("float32")))
    model.steps_per_execution = 1
    whole = model.fit(
        examples.shuffle(len(IDS)).batch(BATCH_SIZE), verbose=0, callbacks=[WaitAtTheEnd()]
    )
    tell(
        f"report-{index}",
        history=history.history,
        whole=whole.history,
        bare=bare.numpy().tolist(),
        biases=biases,
    )
    # Each worker predicts all rows.
    for name in ("arrays", "dataset", "unknown length"):
        check_predict(numbering, name)


def new_ids():
    """Rows and updates of a table without a vocabulary are those of all workers."""
    strategy = kerasps.WorkerDrivenStrategy()
    index = strategy.worker_index
    with strategy.scope():
        table = kerasps.layers.DynamicEmbedding(4, "zeros")
        inputs = keras.Input((2,), dtype="int64")
        model = keras.Model(inputs, keras.layers.Flatten()(table(inputs)))
        model.compile(
            keras.optimizers.SGD(1.0),
            unit_gradients.Outputs(reduction="sum"),
            steps_per_execution=2,
        )

    def shares(context):
        # Some ids come to both workers.
        numbers = IDS[context.input_pipeline_id :: context.num_input_pipelines].astype("int64")
        ids = np.stack([numbers, numbers % 7 - 5], 1)
        targets = np.zeros((len(ids), 8), "float32")
        return tf.data.Dataset.from_tensor_slices((ids, targets)).batch(BATCH_SIZE).repeat()

    class WaitForOthers(keras.callbacks.Callback):
        def on_train_end(self, logs=None):
            tell(f"fit-{index}")
            if strategy.is_chief:
                for worker in range(1, strategy.num_workers):
                    wait_for_file(f"fit-{worker}")

    model.fit(
        kerasps.DatasetCreator(shares),
        epochs=EPOCHS,
        steps_per_epoch=STEPS,
        verbose=0,
        callbacks=[WaitForOthers()],
    )
    if strategy.is_chief:
        rows = np.concatenate([rows for _, rows in table.items()])
        tell("report", num_rows=table.num_rows, updates=float(-rows.sum()))


def lasting():
    """Trains until it is told to stop; says at each epoch how far all are.

    Each weight, and each row of the table, says how often it was updated.
    """
    spread()
    strategy = kerasps.WorkerDrivenStrategy()
    numbers = IDS[:, None].astype("int32")
    model = compiled_unit_model(strategy, len(IDS), lambda: keras.optimizers.SGD(1.0), 1)

    class Tell(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            tell(
                f"epoch-{strategy.worker_index}",
                epoch=epoch,
                pid=os.getpid(),
                iterations=int(self.model.optimizer.iterations.numpy()),
            )
            if strategy.is_chief and (HERE / "stop").exists():
                self.model.stop_training = True

    began_at = int(model.optimizer.iterations.numpy())
    model.fit(
        kerasps.DatasetCreator(unit_gradients.endless(numbers, BATCH_SIZE)),
        epochs=100_000,
        steps_per_epoch=5,
        verbose=0,
        callbacks=[Tell()],
    )
    if not strategy.is_chief:
        wait_for_file("end-0")  # whose steps are all done then
    table, *weights = [-v.numpy() for v in model.trainable_variables]
    tell(
        f"end-{strategy.worker_index}",
        began_at=began_at,
        iterations=int(model.optimizer.iterations.numpy()),
        weights=[np.unique(weight).tolist() for weight in weights],
        rows=float(table.sum()),
        devices=sorted({v.device for v in model.variables}),
    )


def alone():
    """A worker whose chief does not come."""
    kerasps.WorkerDrivenStrategy(chief_timeout=2)


def estimator():
    """`train_and_evaluate`, in any task."""

    def input_fn(input_context):
        return endless(input_context)

    def model_fn():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mae", steps_per_execution=3)
        return model

    best = kerasps.SidecarEvaluatorModelExport(HERE / "best" / "model.keras")
    returned = kerasps.train_and_evaluate(
        model_fn,
        kerasps.TrainSpec(input_fn, max_steps=100),
        kerasps.EvalSpec(input_fn, steps=10, exporters=[best]),
        config=kerasps.RunConfig(HERE / "run", save_checkpoints_steps=40, random_seed=1),
    )
    if isinstance(returned, list):
        tell("evaluations", iterations=[evaluation.iterations for evaluation in returned])
    else:
        tell("trained", iterations=int(returned.model.optimizer.iterations.numpy()))


if __name__ == "__main__":
    {f.__name__: f for f in (equal, counts, new_ids, lasting, alone, estimator)}[sys.argv[1]]()
