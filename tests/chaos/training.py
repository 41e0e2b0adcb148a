"""A training of which every result is known, whatever dies; run by chaos.py under `kerasps launch`.

    python training.py FOLDER OPTIMIZER STEPS_PER_EXECUTION ARGUMENTS [figures]

It goes on until the file `enough` is in the folder, and then to the end of its pass. What it adds
up to is known in advance. With SGD, a learning rate of 1 and gradients of 1, the dense weight is
the number of its updates, and a row of a table how often its id was seen. With Adam and gradients
of 1, the slots follow from the number of updates alone. Tables without a vocabulary meet new ids in
every other pass. One of them gives up rows for these, and keeps of each row how often it was
updated; one has rows for ids that came twice. `ARGUMENTS` are those of the strategy, as JSON. With
`figures` behind them, the figures of tables are compared, too: no ps, and no coordinator, may be
lost then.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf

import kerasps

NUM_IDS, BATCH, STEPS = 2400, 4, 600
MOST_ROWS = 1200
# An odd number, by which small numbers come anywhere in int64.
SPREAD = -7046029254386353131


class Counting(keras.Model):
    """A dense weight, tables, and how often each id was seen.

    `table` has a row for each id, `users` and `words` have one for each id and two passes. Those of
    `words` come in bags of two, with a word that all batches of two passes have. `recent` has half
    of the rows of `users`, and `twice` those whose ids came a second time.
    """

    def __init__(self):
        super().__init__()
        self.dense = self.add_weight(shape=(), initializer="zeros", name="dense")
        self.table = keras.layers.Embedding(
            NUM_IDS, 1, embeddings_initializer="zeros", name="table"
        )
        self.table.build(())
        self.users = kerasps.layers.DynamicEmbedding(1, "zeros", name="users")
        self.words = kerasps.layers.DynamicEmbedding(1, "zeros", combiner="sum", name="words")
        eviction = kerasps.layers.Eviction("lfu", low=0.8)
        self.recent = kerasps.layers.DynamicEmbedding(
            1, "zeros", max_rows=MOST_ROWS, eviction=eviction, name="recent"
        )
        admission = kerasps.layers.CountAdmission(2)
        self.twice = kerasps.layers.DynamicEmbedding(1, "zeros", admission=admission, name="twice")
        self.seen = self.add_weight(
            shape=(NUM_IDS,), initializer="zeros", trainable=False, name="seen"
        )
        # No step updates it: a step that is done again has the same ids, whatever was applied.
        self.pair = self.add_weight(
            shape=(), dtype="int32", initializer="zeros", trainable=False, name="pair"
        )
        for table in (self.users, self.words, self.recent, self.twice):
            table.build()
        self.built = True

    def train_step(self, ids):
        pair = tf.fill(tf.shape(ids), tf.cast(self.pair, tf.int64))
        users = user_ids(tf.cast(ids, tf.int64), pair)
        # The word that all have gets a gradient of 1 from each batch.
        words = tf.stack(
            [words_of(users), tf.strings.join(["pair ", tf.strings.as_string(pair)])], 1
        )
        weights = tf.tile([[1.0, 1.0 / BATCH]], [tf.shape(ids)[0], 1])
        with tf.GradientTape() as tape:
            loss = -self.dense - tf.reduce_sum(self.table(ids))
            loss -= sum(
                tf.reduce_sum(table(users)) for table in (self.users, self.recent, self.twice)
            )
            loss -= tf.reduce_sum(self.words(words, weights=weights))
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        ones = tf.ones_like(ids, tf.float32)
        self.seen.assign_add(tf.math.unsorted_segment_sum(ones, ids, NUM_IDS))
        # A step takes a millisecond or two.
        work = tf.reduce_sum(tf.random.normal((120, 120)) @ tf.random.normal((120, 120)))
        return {"batches": 1.0 + 0.0 * work}


def user_ids(numbers, pair):
    """The ids that these numbers have in a pair of passes, anywhere in int64."""
    return (numbers + NUM_IDS * pair) * SPREAD


def words_of(users):
    return tf.strings.join(["user ", tf.strings.as_string(users)])


class Batches(keras.callbacks.Callback):
    """Sees to the end, and keeps what is not as it should be at the end of a pass."""

    def __init__(self, folder, *, has_figures):
        super().__init__()
        self.folder, self.has_figures = folder, has_figures

    def on_epoch_begin(self, epoch, logs=None):
        self.model.pair.assign(epoch // 2)

    def on_epoch_end(self, epoch, logs=None):
        passes = epoch + 1
        model, steps = self.model, passes * STEPS
        found = {
            "iterations": int(model.optimizer.iterations) - steps,
            "seen": float(np.abs(model.seen.numpy() - passes).max()),
            "batches": float(logs["batches"]) - 1.0,
            **slots(model, steps, passes),
        }
        if self.has_figures:
            found |= figures(model, steps, passes)
        wrong = {name: value for name, value in found.items() if abs(value) > 1e-4}
        record = {"epoch": epoch, "pid": os.getpid(), "wrong": wrong}
        with (self.folder / "passes").open("a") as passes_file:
            passes_file.write(json.dumps(record) + "\n")
        model.stop_training = (self.folder / "enough").exists()


def expected_updates(layer, steps, passes):
    """The ids of a table, or None for all of them in order, and how often each was updated."""
    if isinstance(layer, keras.layers.Embedding):
        return None, passes
    if layer.name == "recent":
        ids = layer.embeddings.numpy().ids
        assert 0.7 * MOST_ROWS < len(ids) <= MOST_ROWS
        # The columns: the last use, the number of updates.
        return ids, layer._usage.access.read(ids)[:, 1]
    if layer.name == "twice":
        ids = [user_ids(tf.range(NUM_IDS, dtype=tf.int64), pair) for pair in range(passes // 2)]
        ids = np.concatenate([np.zeros(0, "int64"), *ids])
        return ids, np.ones(len(ids))
    pairs = range((passes + 1) // 2)
    updates = [min(2, passes - 2 * pair) for pair in pairs]
    users = tf.concat([user_ids(tf.range(NUM_IDS, dtype=tf.int64), pair) for pair in pairs], 0)
    ids, times = users, np.repeat(updates, NUM_IDS)
    if layer.combiner:
        words = tf.concat([words_of(users), [f"pair {pair}" for pair in pairs]], 0)
        ids = tf.bitcast(tf.fingerprint(words), tf.int64)
        times = np.concatenate([times, np.multiply(updates, STEPS)])
    return ids.numpy(), times


def distance(value, ids, expected):
    """How far a value is from what it must be; with other ids, a thousand for each."""
    if ids is not None:
        order = np.argsort(ids)
        if not np.array_equal(value.ids, ids[order]):
            return 1000.0 * len(np.setxor1d(value.ids, ids))
        value, expected = value.rows[:, 0], expected[order]
    return float(np.abs(value - expected).max(initial=0.0))


def slots(model, steps, passes):
    """How far each weight, and each slot of an optimizer, is from what it must be."""
    optimizer, found = model.optimizer, {}
    by_path = {"dense": (None, steps)}
    for layer in (model.table, model.users, model.words, model.recent, model.twice):
        ids, times = by_path[layer.name] = expected_updates(layer, steps, passes)
        if not isinstance(optimizer, keras.optimizers.SGD):
            continue
        found[layer.name] = distance(layer.embeddings.numpy(), ids, times)
        if ids is not None:
            found[f"rows of {layer.name}"] = layer.num_rows - len(ids)
    if isinstance(optimizer, keras.optimizers.SGD):
        return found | {"dense": float(model.dense.numpy()) - steps}
    for variable in optimizer.variables:
        path = variable.path
        if "momentum" in path or "velocity" in path:
            beta = optimizer.beta_1 if "momentum" in path else optimizer.beta_2
            sign = -1.0 if "momentum" in path else 1.0
            ids, times = next(of for name, of in by_path.items() if name in path)
            found[path] = distance(variable.numpy(), ids, sign * (1.0 - beta**times))
    assert len(found) == 12, found
    return found


def figures(model, steps, passes):
    """How far figures of tables are from what they must be."""
    recent, twice = model.recent.figures(), model.twice.figures()
    rows, candidates = NUM_IDS * (passes // 2), NUM_IDS * (passes % 2)
    return {
        "pushed": recent["pushed_ids"] - steps * BATCH,
        "given up": recent["inserted"] - recent["evicted"] - recent["rows"],
        "full": recent["refused_for_room"],
        "admitted": twice["inserted"] - rows,
        "candidates": twice["candidates"] - candidates,
        "dropped": twice["refused_by_admission"] - rows - candidates,
    }


def main():
    folder, name, steps_per_execution = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    shards = kerasps.FixedShardsPartitioner(2, min_bytes=1024)
    strategy = kerasps.ParameterServerStrategy(
        variable_partitioner=shards, table_min_bytes=0, **json.loads(sys.argv[4])
    )
    with strategy.scope():
        model = Counting()
        optimizer = {"sgd": keras.optimizers.SGD(1.0), "adam": keras.optimizers.Adam(0.001)}[name]
        model.compile(optimizer, steps_per_execution=steps_per_execution)
    data = tf.data.Dataset.range(NUM_IDS).map(lambda i: tf.cast(i, tf.int32))
    data = data.shuffle(NUM_IDS, seed=1).batch(BATCH)
    model.fit(
        data,
        epochs=100_000,
        verbose=0,
        callbacks=[
            keras.callbacks.BackupAndRestore(str(folder / "backup")),
            Batches(folder, has_figures="figures" in sys.argv[5:]),
        ],
    )
    (folder / "done").write_text(str(os.getpid()))


if __name__ == "__main__":
    main()
