"""A model with tables without a vocabulary, its data, and all of its state."""

from __future__ import annotations

import keras
import numpy as np

from kerasps.dynamic.tables.row_files import VariableById
from kerasps.layers import CountAdmission, DynamicEmbedding


def make_model(optimizer="adam", names=("users", "items", "words"), max_rows=None):
    """Returns a compiled model with tables. Those of users and of items share their storage.

    An item gets a row when it comes for the second time.
    """
    first, second = keras.Input((3,), dtype="int64"), keras.Input((2,), dtype="int64")
    uniform = keras.initializers.RandomUniform(-1, 1)
    tables = {
        "users": (first, {"output_dim": 4, "embeddings_initializer": uniform, "seed": 1}),
        "items": (
            second,
            {
                "output_dim": 4,
                "embeddings_initializer": uniform,
                "seed": 2,
                "admission": CountAdmission(2, max_candidates=1000),
            },
        ),
        "words": (second, {"output_dim": 6, "embeddings_initializer": "ones"}),
    }
    flat = []
    for name in names:
        ids, arguments = tables[name]
        table = DynamicEmbedding(name=name, max_rows=max_rows, **arguments)
        flat.append(keras.layers.Flatten()(table(ids)))
    joined = keras.layers.Concatenate()(flat) if len(flat) > 1 else flat[0]
    output = keras.layers.Dense(1, kernel_initializer="ones")(joined)
    model = keras.Model([first, second], output)
    model.compile(optimizer, "mse", steps_per_execution=2)
    model.optimizer.build(model.trainable_variables)
    return model


def make_data(seed, num_examples=48):
    """Returns inputs and targets. Ids are of any size, and half of them differ between seeds."""
    chance = np.random.default_rng(seed)
    always, now = np.random.default_rng(99), np.random.default_rng(100 + seed)
    ids = np.concatenate([source.integers(-(2**62), 2**62, 20) for source in (always, now)])
    inputs = [ids[chance.integers(0, 40, (num_examples, n))] for n in (3, 2)]
    return inputs, chance.normal(size=(num_examples, 1)).astype("float32")


def train(model, seed, batch_size=8, **kwargs):
    """Trains on the data of a seed, in their order."""
    inputs, targets = make_data(seed)
    return model.fit(inputs, targets, batch_size, shuffle=False, verbose=0, **kwargs)


def state_of(model):
    """Returns the values of all variables of a model and of its optimizer, by their places."""
    state = {}
    counts = [each for each in model.non_trainable_weights if isinstance(each, VariableById)]
    variables = [*model.trainable_weights, *counts, *model.optimizer.variables]
    for index, variable in enumerate(variables):
        if isinstance(variable, VariableById):
            state[f"{index}/ids"] = ids = variable.sorted_ids()
            state[f"{index}"] = variable.find_rows(ids)
        else:
            state[f"{index}"] = np.asarray(variable.numpy())
    return state


def differences(state, expected):
    """Returns the places at which two states differ in a bit."""
    assert state.keys() == expected.keys()
    return [key for key, value in state.items() if not np.array_equal(value, expected[key])]


def nearly(state, expected):
    """Returns the places at which values differ by more than rounding."""
    assert state.keys() == expected.keys()
    return [
        key for key in expected if not np.allclose(state[key], expected[key], rtol=1e-5, atol=1e-7)
    ]
