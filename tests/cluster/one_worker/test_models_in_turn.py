"""Models of one shape, made in turn: a later one uses the step graphs of the first one."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import kerasps
from kerasps.variables.rows import row_pools
from support.turns import NUM_ROWS, varied_data, varied_model, wait_until_gone, watch


def make(strategy):
    with strategy.scope():
        model = varied_model()
        model.compile("adam", "mse", steps_per_execution=2)
    return model


def step_graphs_of(model):
    """Return what tells a model's step graphs from others; all are kept, so no `id` comes twice."""
    steps = [model.train_function, model.test_function, model.predict_function]
    return {id(graph) for step in steps for graph in step._step_graphs.values()}


@pytest.mark.matrix
def test_a_model_like_one_that_is_gone_uses_its_step_graphs_and_names_its_own_table(
    strategy, monkeypatch
):
    # Some tables share storages.
    monkeypatch.setattr(row_pools, "NUM_SEPARATE", 1)
    x, y = varied_data()
    graphs = []
    for number in range(3):
        model = make(strategy)
        model.fit(x, y, batch_size=8, verbose=0)
        model.evaluate(x, y, batch_size=8, verbose=0)
        model.predict(x, batch_size=8, verbose=0)
        graphs.append(step_graphs_of(model))
        if number < 2:
            watched = watch(model)
            del model
            wait_until_gone(watched)
    # With the first one, what other tests have left may go.
    assert graphs[1] == graphs[2]
    x, y = varied_data()
    tables = [layer for layer in model.layers if isinstance(layer, keras.layers.Embedding)]
    (smallest,) = (layer.embeddings for layer in tables if layer.input_dim == min(NUM_ROWS))
    with pytest.raises(kerasps.InputError, match=f"'{smallest.path}' has {min(NUM_ROWS)} rows"):
        model.fit({**x, "ids": x["ids"] + 75}, y, batch_size=8, verbose=0)
    # As before.
    assert np.isfinite(model.evaluate(x, y, batch_size=8, verbose=0))
