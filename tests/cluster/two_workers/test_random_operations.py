"""TensorFlow's random operations in a step: each step of any worker draws other numbers."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from support.matrix import with_matrix

# Not a multiple of workers and executions: the last steps find no data at different places.
NUM_STEPS, NUM_BINS = 203, 2**16
DATA = np.zeros((NUM_STEPS, 1), "float32")


def sampled():
    drawn, _, _ = tf.random.log_uniform_candidate_sampler([[1]], 1, 4, True, NUM_BINS)
    return tf.reduce_sum(drawn * tf.constant([1, 257, 4099, 31], tf.int64)) % NUM_BINS


def in_loop():
    drawn = tf.map_fn(lambda _: tf.random.uniform([], 0, NUM_BINS, tf.int32), tf.range(2))
    return drawn[0] ^ drawn[1]


DRAWS = {
    "uniform": lambda: tf.random.uniform([], 0, NUM_BINS, tf.int32),
    "with its own seed": lambda: tf.random.uniform([], 0, NUM_BINS, tf.int32, seed=5),
    "normal": lambda: tf.cast(tf.abs(tf.random.normal([])) * 1e7, tf.int32) % NUM_BINS,
    "shuffle": lambda: tf.random.shuffle(tf.range(NUM_BINS))[0],
    "sampler": sampled,
    "loop": in_loop,
}


class Drawing(keras.Model):
    """Counts the numbers that its steps draw."""

    def __init__(self, draw):
        super().__init__()
        self.draw = draw
        self.dense = keras.layers.Dense(1)
        self.counts = self.add_weight(
            shape=(NUM_BINS,), initializer="zeros", trainable=False, name="counts"
        )

    def call(self, x):
        return self.dense(x)

    def count(self):
        self.counts.assign_add(tf.one_hot(tf.cast(self.draw(), tf.int32), NUM_BINS))

    def train_step(self, data):
        self.count()
        return super().train_step(data)

    def test_step(self, data):
        self.count()
        return super().test_step(data)

    def predict_step(self, data):
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        return tf.cast(tf.reshape(self.draw(), [1, 1]), tf.float32) + 0.0 * self(x)


def made(strategy, draw, **arguments):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = Drawing(draw)
        model.compile("sgd", "mse", **arguments)
    return model


def num_different(model):
    counts = np.array(model.counts)
    return int(counts.sum()), int((counts > 0).sum())


@pytest.mark.parametrize(
    ("name", "steps"),
    with_matrix(
        [(name, steps) for name in DRAWS for steps in (1, 5, 50)],
        [
            (name, steps)
            for name in DRAWS
            for steps in (1, 5, 50)
            if (name, steps) not in (("uniform", 5), ("sampler", 5), ("loop", 50))
        ],
    ),
)
def test_steps_of_all_workers_draw_different_numbers(strategy, name, steps):
    model = made(strategy, DRAWS[name], steps_per_execution=steps)
    model.fit(DATA, DATA, batch_size=1, verbose=0)
    num_drawn, num_once = num_different(model)
    assert num_drawn == NUM_STEPS
    # Of so many numbers at random from so many, one or two come twice.
    assert num_once >= NUM_STEPS - 5
    model.fit(DATA, DATA, batch_size=1, verbose=0)
    model.evaluate(DATA, DATA, batch_size=1, verbose=0)
    model.train_on_batch(DATA[:1], DATA[:1])
    num_drawn, num_once = num_different(model)
    assert num_drawn == 3 * NUM_STEPS + 1
    assert num_once >= num_drawn - 15


def test_predictions_differ_and_a_new_model_repeats_them(strategy):
    drawn = []
    for _ in range(2):
        model = made(strategy, DRAWS["uniform"], steps_per_execution=5)
        # Each worker has whole executions, so all numbers that are given out are used.
        drawn += [model.predict(DATA[:200], batch_size=1, verbose=0)[:, 0] for _ in range(2)]
    first, second, again, _ = (set(draws.tolist()) for draws in drawn)
    assert len(first | second) >= 2 * 200 - 8
    assert first == again


def test_compiled_steps_of_all_workers_draw_different_numbers(strategy):
    """XLA begins with the same number in each process, and ignores seeds."""
    model = made(strategy, DRAWS["uniform"], steps_per_execution=5, jit_compile=True)
    model.fit(DATA, DATA, batch_size=1, verbose=0)
    assert num_different(model)[1] >= NUM_STEPS - 5


class Sampling(keras.Model):
    """Looks up rows of a table at sampled ids; each row holds its number."""

    def __init__(self, num_rows, seeded):
        super().__init__()
        self.num_rows, self.seeded = num_rows, seeded
        self.table = keras.layers.Embedding(
            num_rows, 1, lambda shape, dtype: tf.reshape(tf.range(shape[0], dtype=dtype), shape)
        )
        self.table.build()
        self.built = True
        self.error = keras.metrics.Sum("error")

    def train_step(self, data):
        ids, _, _ = tf.random.uniform_candidate_sampler([[1]], 1, 4, True, self.num_rows)
        if not self.seeded:
            ids = tf.random.uniform([4], 0, self.num_rows, tf.int32)
        with tf.GradientTape() as tape:
            rows = self.table(ids)
            loss = tf.reduce_sum(rows)
        self.optimizer.apply(
            tape.gradient(loss, self.trainable_variables), self.trainable_variables
        )
        self.error.update_state(tf.abs(rows[:, 0] - tf.cast(ids, tf.float32)))
        return {"error": self.error.result()}


@pytest.mark.parametrize("seeded", [True, False])
def test_rows_are_those_of_the_ids_that_a_step_draws(strategy, seeded):
    """Ids that follow from the step's number are found ahead; others make the table whole."""
    if seeded:
        keras.utils.set_random_seed(1)
    else:
        tf.random.set_seed(None)
    with strategy.scope():
        model = Sampling(500, seeded)
        model.compile(keras.optimizers.SGD(0.0), steps_per_execution=5)
    history = model.fit(DATA, DATA, batch_size=10, verbose=0)
    assert history.history["error"] == [0.0]
    assert (
        model.table.embeddings in model.train_function.plans.trace.plan.inventory.tables
    ) == seeded
