"""Variables that TensorFlow cannot send whole, or cannot look up; here the limits are lower."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from kerasps.variables.placing import placing

X = np.random.default_rng(0).normal(size=(32, 40)).astype("float32")
Y = np.random.default_rng(1).normal(size=(32, 50)).astype("float32")


def made():
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((40,)), keras.layers.Dense(50), keras.layers.Dense(50)])
    model.compile("adam", "mse", steps_per_execution=2)
    return model


def test_a_variable_that_is_too_large_to_send_is_split(strategy, monkeypatch, tmp_path):
    plain = made()
    monkeypatch.setattr(placing, "MAX_SENT_BYTES", 3000)
    with strategy.scope():
        model = made()
    kernel = model.layers[0].kernel
    assert [tuple(shard.shape) for shard in kernel.shards] == [(7, 50)] * 5 + [(5, 50)] or all(
        shard.shape.num_elements() * 4 <= 3000 for shard in kernel.shards
    )
    assert len(kernel.shards) > 1
    assert len(model.layers[0].bias.shards) == 1
    for trained in (model, plain):
        trained.fit(X, Y, batch_size=8, verbose=0, shuffle=False)
        trained.train_on_batch(X[:8], Y[:8])
    np.testing.assert_allclose(model.predict(X, verbose=0), plain.predict(X, verbose=0), rtol=1e-4)
    losses = [trained.evaluate(X, Y, verbose=0) for trained in (model, plain)]
    np.testing.assert_allclose(*losses, rtol=1e-5)
    weights = model.get_weights()
    model.save_weights(tmp_path / "a.weights.h5")
    kernel.assign(np.zeros((40, 50), "float32"))
    assert not np.array(kernel).any()
    model.load_weights(tmp_path / "a.weights.h5")
    for before, after in zip(weights, model.get_weights(), strict=True):
        np.testing.assert_array_equal(before, after)
    model.set_weights([2 * weight for weight in weights])
    np.testing.assert_array_equal(np.array(kernel), 2 * weights[0])


def test_a_partitioner_that_splits_too_little_is_helped(strategy, monkeypatch, sharded):
    monkeypatch.setattr(placing, "MAX_SENT_BYTES", 3000)
    sharded(2)
    with strategy.scope():
        model = made()
    assert len(model.layers[0].kernel.shards) == 6


def test_a_table_with_more_rows_than_a_lookup_counts_is_refused(strategy, monkeypatch, sharded):
    monkeypatch.setattr(placing, "MAX_SHARD_ROWS", 1000)
    with strategy.scope():
        layer = keras.layers.Embedding(2500, 2, name="large")
        with pytest.raises(
            ValueError,
            match=r"'embeddings' has more rows than TensorFlow can look up in a shard\. Expected: "
            r"at most 1,000 rows a shard\. Received: 2,500 rows in 1 shard\(s\)\. Pass "
            r"`kerasps\.FixedShardsPartitioner\(3\)` as `variable_partitioner`",
        ):
            layer.build()
    sharded(3)
    with strategy.scope():
        table = keras.layers.Embedding(2500, 2)
        table.build()
    assert len(table.embeddings.shards) == 3
