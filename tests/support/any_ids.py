"""A small layer with a table without a vocabulary."""

from __future__ import annotations

import keras
import numpy as np

from kerasps.dynamic.first_rows import FirstRows
from kerasps.dynamic.row_files import save_table
from kerasps.dynamic.rows_of_ids import MOST_ROWS, RowsOfIds


@keras.saving.register_keras_serializable(package="kerasps tests")
class AnyIds(keras.layers.Layer):
    def __init__(self, width, initializer="uniform", seed=1, max_rows=None, **kwargs):
        super().__init__(autocast=False, **kwargs)
        self.width, self.initializer = width, keras.initializers.get(initializer)
        self.seed, self.max_rows = seed, max_rows

    def build(self, shape=None):
        first_rows = FirstRows.of(self.initializer, self.width, self.variable_dtype)
        self.embeddings = self.add_weight(
            name="embeddings",
            shape=(MOST_ROWS, self.width),
            initializer=RowsOfIds(first_rows, self.seed, self.max_rows),
        )

    def call(self, ids):
        return self.embeddings.take(ids)

    def compute_output_shape(self, shape):
        return (*shape, self.width)

    def get_config(self):
        return {
            **super().get_config(),
            "width": self.width,
            "initializer": keras.initializers.serialize(self.initializer),
            "seed": self.seed,
            "max_rows": self.max_rows,
        }

    def save_own_variables(self, store):
        save_table(store, self.embeddings)

    def load_own_variables(self, store):
        self.embeddings.replace_rows(np.asarray(store["ids"]), store["rows"])


def make_model(optimizer="adam"):
    """Returns a compiled model with three tables, of which two share their storage."""
    first, second = keras.Input((3,), dtype="int64"), keras.Input((2,), dtype="int64")
    uniform = keras.initializers.RandomUniform(-1, 1)
    vectors = [
        AnyIds(4, uniform, seed=1, name="users")(first),
        AnyIds(4, uniform, seed=2, name="items")(second),
        AnyIds(6, "ones", name="words")(second),
    ]
    flat = [keras.layers.Flatten()(vector) for vector in vectors]
    output = keras.layers.Dense(1, kernel_initializer="ones")(keras.layers.Concatenate()(flat))
    model = keras.Model([first, second], output)
    model.compile(optimizer, "mse", steps_per_execution=2)
    model.optimizer.build(model.trainable_variables)
    return model


def make_data(seed, num_examples=48):
    """Returns inputs and targets. Ids are of any size, and half of them differ between seeds."""
    chance = np.random.default_rng(seed)
    known, own = np.random.default_rng(99), np.random.default_rng(100 + seed)
    ids = np.concatenate([source.integers(-(2**62), 2**62, 20) for source in (known, own)])
    inputs = [ids[chance.integers(0, 40, (num_examples, n))] for n in (3, 2)]
    return inputs, chance.normal(size=(num_examples, 1)).astype("float32")


def train(model, seed, **kwargs):
    """Trains on the data of a seed, in their order."""
    inputs, targets = make_data(seed)
    return model.fit(inputs, targets, batch_size=8, shuffle=False, verbose=0, **kwargs)


def state_of(model):
    """Returns the values of all variables of a model and of its optimizer, by their places."""
    state = {}
    for index, variable in enumerate([*model.weights, *model.optimizer.variables]):
        value = variable.numpy()
        if hasattr(value, "ids"):
            state[f"{index}/ids"], value = value.ids, value.rows
        state[f"{index}"] = np.asarray(value)
    return state


def differences(state, expected):
    """Returns the places at which two states differ in a bit."""
    assert state.keys() == expected.keys()
    return [key for key, value in state.items() if not np.array_equal(value, expected[key])]
