"""Tables without a vocabulary in one process: keys, first rows, and the layer."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf

import kerasps
from kerasps.dynamic.ids.first_rows import FirstRows
from kerasps.dynamic.ids.keys import as_ids, from_halves, halves, mixed, part_of, salt_of, unmixed
from kerasps.dynamic.ids.rows_of_ids import RowsOfIds
from kerasps.dynamic.local import local_places
from kerasps.layers import DynamicEmbedding

EXTREMES = [0, 1, -1, 2**63 - 1, -(2**63), 2**40]
RANDOM = keras.initializers
# What the rows of an id depend on must not change between versions, or files mean something else.
UNIFORM = ("-0x1.83315ep-5", "0x1.320098p-7", "-0x1.984dp-5", "0x1.bfa8b4p-6")
NORMAL = ("-0x1.8976ccp-4", "0x1.8316ap-7", "-0x1.2e232cp-3", "0x1.330152p-5")
TRUNCATED = ("-0x1.532788p-4", "0x1.712accp-7", "-0x1.94032p-4", "0x1.225a66p-5")


def id_tensor(values):
    return tf.constant(values, tf.int64)


# Keys


def test_keys_are_a_bijection():
    ids = id_tensor(EXTREMES + list(range(1000)))
    keys = mixed(ids)
    assert len(np.unique(keys)) == len(np.unique(ids))
    np.testing.assert_array_equal(unmixed(keys), ids)
    np.testing.assert_array_equal(from_halves(halves(keys)), keys)


@pytest.mark.parametrize("num_parts", [1, 3, 7])
@pytest.mark.parametrize("stride", [1, 64, 2**32])
def test_parts_are_even(num_parts, stride):
    parts = part_of(mixed(tf.range(30_000, dtype=tf.int64) * stride), num_parts)
    counts = np.bincount(parts, minlength=num_parts)
    assert len(counts) == num_parts
    # Five standard deviations of a binomial distribution.
    assert np.abs(counts - 30_000 / num_parts).max() <= 5 * np.sqrt(30_000 / num_parts)


def test_ids_of_strings_are_their_fingerprints():
    texts = ["", "a", "user:17", "ü"]
    expected = [np.frombuffer(bytes(row), np.int64)[0] for row in tf.fingerprint(texts).numpy()]
    np.testing.assert_array_equal(as_ids(tf.constant([texts])), [expected])


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "int32", "int64", "uint32"])
def test_ids_of_any_width_are_int64(dtype):
    ids = as_ids(tf.constant([0, 100], dtype))
    assert ids.dtype == tf.int64
    np.testing.assert_array_equal(ids, [0, 100])


def test_large_unsigned_ids_keep_their_bits():
    np.testing.assert_array_equal(as_ids(tf.constant([2**64 - 2], tf.uint64)), [-2])


@pytest.mark.parametrize("dtype", ["float32", "bool", "complex64"])
def test_other_values_are_no_ids(dtype):
    with pytest.raises(kerasps.InputError, match=f"integers or strings. Received: {dtype}"):
        as_ids(tf.zeros([1], dtype))


# First rows


def first_rows(initializer, width=4, dtype="float32"):
    return FirstRows.of(initializer, width, dtype)


@pytest.mark.parametrize(
    ("initializer", "golden"),
    [
        (RANDOM.RandomUniform(), UNIFORM),
        (RANDOM.RandomNormal(), NORMAL),
        (RANDOM.TruncatedNormal(), TRUNCATED),
    ],
)
def test_the_bits_of_first_rows_never_change(initializer, golden):
    row = first_rows(initializer)(id_tensor([42]), salt_of(7))[0]
    assert [float(value) for value in row] == [float.fromhex(value) for value in golden]


def in_company():
    for initializer in (RANDOM.RandomUniform, RANDOM.RandomNormal, RANDOM.TruncatedNormal):
        for width in (1, 3, 16):
            yield initializer(-0.3, 0.7), width


@pytest.mark.parametrize(("initializer", "width"), list(in_company()))
def test_a_first_row_is_the_same_in_any_order_and_company(initializer, width):
    make = first_rows(initializer, width)
    in_graph = tf.function(
        lambda ids: make(ids, salt_of(3)), input_signature=[tf.TensorSpec([None], tf.int64)]
    )
    ids = tf.range(20_000, dtype=tf.int64) * 977 - 9
    rows = make(ids, salt_of(3)).numpy()
    np.testing.assert_array_equal(in_graph(ids), rows)
    order = np.random.default_rng(0).permutation(len(rows))
    np.testing.assert_array_equal(in_graph(tf.gather(ids, order)), rows[order])
    for start in range(0, 20_000, 1000):
        for count in (1, 7, 30):
            part = slice(start, start + count)
            np.testing.assert_array_equal(in_graph(ids[part]), rows[part])


@pytest.mark.parametrize(
    ("initializer", "mean", "deviation", "bound"),
    [
        (RANDOM.RandomUniform(-1, 3), 1, 4 / np.sqrt(12), 2),
        (RANDOM.RandomNormal(0.5, 2), 0.5, 2, np.inf),
        (RANDOM.TruncatedNormal(0.5, 2), 0.5, 2 * 0.87962566, 4),
        (RANDOM.VarianceScaling(2.0, "fan_out", "untruncated_normal"), 0, np.sqrt(2 / 8), np.inf),
        (RANDOM.GlorotUniform(), 0, np.sqrt(2 / 9), np.sqrt(6 / 9)),
        (RANDOM.HeNormal(), 0, np.sqrt(2), 2 * np.sqrt(2) / 0.8796),
    ],
)
def test_first_rows_have_the_moments_of_their_distribution(initializer, mean, deviation, bound):
    rows = first_rows(initializer, 8)(tf.range(50_000, dtype=tf.int64), salt_of(1)).numpy()
    assert rows.mean() == pytest.approx(mean, abs=6 * deviation / np.sqrt(rows.size))
    assert rows.std() == pytest.approx(deviation, rel=0.01)
    assert np.abs(rows - mean).max() <= bound
    # Neither elements of a row nor rows of consecutive ids go together.
    assert np.abs(np.corrcoef(rows.T) - np.eye(8)).max() < 0.03
    assert abs(np.corrcoef(rows[1:, 0], rows[:-1, 0])[0, 1]) < 0.03


@pytest.mark.parametrize(
    "initializer",
    [RANDOM.Orthogonal(), RANDOM.Identity(), RANDOM.Constant(np.ones(3)), lambda shape: shape],
)
def test_other_initializers_are_refused(initializer):
    name = type(initializer).__name__
    with pytest.raises(kerasps.UnsupportedError, match=f"Received: {name}"):
        first_rows(initializer)


def test_the_weight_on_ps_has_no_value_as_a_whole():
    initializer = RowsOfIds(first_rows(RANDOM.Zeros()), 1, None)
    with pytest.raises(kerasps.UnsupportedError, match=r"Received: a value of shape \(2, 4\)"):
        initializer((2, 4))


# The layer


def small(**options):
    return DynamicEmbedding(3, **{"max_rows": 100, "seed": 1, **options})


def model_of(layer, num_ids=4, dtype="int64", optimizer="adam", **options):
    model = keras.Sequential(
        [
            keras.Input((num_ids,), dtype=dtype),
            layer,
            keras.layers.Flatten(),
            keras.layers.Dense(1, kernel_initializer="ones"),
        ]
    )
    model.compile(optimizer, "mse", **options)
    return model


def eager_model_of(layer, **options):
    """Return a model whose few steps take less time than their trace would."""
    return model_of(layer, run_eagerly=True, **options)


def data(num_ids=40, seed=0):
    """Ids, the labels of the examples, and the different ids in the order in which they come."""
    draw = np.random.default_rng(seed)
    ids = draw.integers(0, num_ids, (64, 4)) - num_ids // 2
    different = list(dict.fromkeys(ids.ravel().tolist()))
    return ids, draw.normal(size=64).astype(np.float32), different


def train(model, ids, labels, **options):
    model.fit(ids, labels, batch_size=16, shuffle=False, verbose=0, **options)


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "adam"])
def test_it_equals_an_embedding_with_the_same_first_values(optimizer):
    ids, labels, different = data()
    places = {row: place for place, row in enumerate(different)}
    initializer = keras.initializers.Constant(0.5)
    dynamic = model_of(small(embeddings_initializer=initializer), optimizer=optimizer)
    fixed = model_of(
        keras.layers.Embedding(100, 3, embeddings_initializer=initializer), optimizer=optimizer
    )
    train(dynamic, ids, labels, epochs=5)
    train(fixed, np.vectorize(places.get)(ids), labels, epochs=5)
    expected = fixed.layers[0].embeddings.numpy()[: len(different)]
    np.testing.assert_array_equal(dynamic.layers[0].rows(different), expected)
    assert not np.allclose(expected, 0.5)
    # The rows are in the order in which they were made.
    made, rows = next(dynamic.layers[0].items())
    assert made.tolist() == different
    np.testing.assert_array_equal(rows, expected)


def test_only_training_makes_rows():
    ids, labels, different = data()
    layer = small()
    model = model_of(layer)
    first = layer.rows(different)
    before = model.predict(ids, verbose=0)
    model.evaluate(ids, labels, verbose=0)
    model(ids)
    layer(ids)
    assert layer.num_rows == 0
    np.testing.assert_array_equal(layer(ids), first[[[different.index(i) for i in r] for r in ids]])
    train(model, ids[:16], labels[:16])
    trained = set(ids[:16].ravel().tolist())
    assert layer.num_rows == len(trained)
    rows = layer.rows(different)
    for row, first_row, number in zip(rows, first, different, strict=True):
        assert np.array_equal(row, first_row) == (number not in trained)
    assert not np.array_equal(model.predict(ids, verbose=0), before)
    assert layer.num_rows == len(trained)


def test_a_gradient_reaches_the_row_of_its_id_alone():
    layer = small(max_rows=3)
    layer(id_tensor([4, 5]), training=True)

    def gradient(training):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(id_tensor([[5, 77, 78]]), training=training) * 2.0)
        return tape.gradient(loss, layer.embeddings.value)

    # There is room for one row more: a missing id changes no row of another one.
    for training in (False, True):
        np.testing.assert_array_equal(gradient(training).indices, [1, 2])
        np.testing.assert_array_equal(gradient(training).values, np.full((2, 3), 2.0))
    assert next(layer.items())[0].tolist() == [4, 5, 77]
    layer.trainable = False
    layer.load_own_variables({"ids": np.zeros(0, np.int64), "rows": np.zeros((0, 3))})
    gradient(False)
    assert layer.num_rows == 0


def test_ids_may_be_extreme():
    layer = small()
    train(eager_model_of(layer, num_ids=6), np.array([EXTREMES]), np.ones(1))
    assert sorted(next(layer.items())[0]) == sorted(EXTREMES)
    np.testing.assert_array_equal(layer.rows(np.array([2**63], np.uint64)), layer.rows([-(2**63)]))


def test_ids_may_be_strings():
    layer = small()
    model = eager_model_of(layer, num_ids=2, dtype="string")
    train(model, tf.constant([["a", "b"], ["a", ""]]), np.ones(2))
    assert layer.num_rows == 3
    ids, rows = next(layer.items())
    assert set(ids) == set(as_ids(tf.constant(["a", "b", ""])).numpy())
    np.testing.assert_array_equal(layer.rows(["a", "b"]), rows[:2])
    np.testing.assert_array_equal(layer.rows(tf.constant(["b"])), layer.rows(np.array([b"b"])))


def test_a_ragged_tensor_of_ids_has_a_ragged_one_of_rows():
    layer = small(mask_zero=True)
    ids = tf.ragged.constant([[5, 0], [], [5, 6, 7]], dtype=tf.int64)
    rows = layer(ids)
    assert rows.shape == (3, None, 3)
    np.testing.assert_array_equal(rows.flat_values, layer.rows(ids.flat_values))
    assert layer.compute_mask(ids).to_list() == [[True, False], [], [True, True, True]]
    inputs = keras.Input((None,), dtype="int64", ragged=True)
    output = layer(inputs)
    assert output.ragged
    assert output.shape == (None, None, 3)
    np.testing.assert_array_equal(keras.Model(inputs, output)(ids).flat_values, rows.flat_values)


def bags():
    """Bags of ids with weights, one empty, one of zeros: dense, ragged, sparse, and in NumPy."""
    ids = tf.ragged.constant([[5, 7, 5], [0, 9], [], [0, 0]], dtype=tf.int64)
    weights = tf.ragged.constant([[1.0, -2.0, 0.5], [3.0, 4.0], [], [2.0, 2.0]])
    return ids, weights


def combined(layer, ids, weights):
    """Return what `tf.nn.embedding_lookup_sparse` defines."""
    results = []
    for bag, factors in zip(ids, weights, strict=True):
        kept = [(i, w) for i, w in zip(bag, factors, strict=True) if i != 0 or not layer.mask_zero]
        total = np.zeros(3, np.float32)
        for number, factor in kept:
            total = total + layer.rows([number])[0] * factor
        divisor = {
            "sum": 1.0,
            "mean": sum(w for _, w in kept),
            "sqrtn": np.sqrt(sum(w * w for _, w in kept)),
        }[layer.combiner]
        results.append(total / divisor if divisor else np.zeros(3))
    return np.stack(results)


@pytest.mark.parametrize(
    ("combiner", "mask_zero", "weighted"),
    [
        ("sum", False, False),
        ("sum", True, True),
        ("mean", True, False),
        ("mean", False, True),
        ("sqrtn", True, True),
    ],
)
def test_bags(combiner, mask_zero, weighted):
    layer = small(combiner=combiner, mask_zero=mask_zero)
    ids, weights = bags()
    factors = weights if weighted else tf.ones_like(weights)
    expected = combined(layer_built(layer), ids.to_list(), factors.to_list())
    options = {"weights": weights} if weighted else {}
    np.testing.assert_allclose(layer(ids, **options), expected, rtol=1e-5, atol=1e-7)
    options = {"weights": weights.to_sparse()} if weighted else {}
    np.testing.assert_allclose(layer(ids.to_sparse(), **options), expected, rtol=1e-5, atol=1e-7)
    # A dense bag has no holes: with `mask_zero`, zeros are holes.
    if mask_zero:
        options = {"weights": weights.to_tensor()} if weighted else {}
        result = layer(ids.to_tensor(), **options)
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-7)
        assert layer.compute_mask(ids.to_tensor()) is None


def layer_built(layer):
    layer.build()
    return layer


def test_bags_are_along_the_last_axis():
    layer = layer_built(small(combiner="sum"))
    ids = np.arange(24).reshape(2, 3, 4)
    expected = layer.rows(ids.ravel()).reshape(2, 3, 4, 3).sum(2)
    np.testing.assert_allclose(layer(ids), expected, rtol=1e-5)
    ragged = tf.ragged.constant([[[1], [2, 3]], [[4, 5]]], dtype=tf.int64)
    result = layer(ragged)
    assert result.row_lengths().numpy().tolist() == [2, 1]
    np.testing.assert_allclose(result[0, 1], layer.rows([2, 3]).sum(0), rtol=1e-5)
    uniform = tf.RaggedTensor.from_row_lengths(id_tensor([[1, 2], [3, 4], [5, 6]]), [2, 1])
    np.testing.assert_allclose(layer(uniform)[1, 0], layer.rows([5, 6]).sum(0), rtol=1e-5)


def test_zeros_of_bags_make_no_row():
    layer = small(combiner="mean", mask_zero=True)
    layer(id_tensor([[0, 3], [0, 0]]), training=True)
    assert next(layer.items())[0].tolist() == [3]


@pytest.mark.parametrize("kind", ["dense", "ragged", "sparse"])
def test_bags_train_in_a_functional_model(kind):
    options = {} if kind == "dense" else {kind: True}
    layer = small(combiner="mean")
    inputs = keras.Input((None,), dtype="int64", name="ids", **options)
    weights = keras.Input((None,), name="weights", **options)
    output = layer(inputs, weights=weights)
    assert output.shape == (None, 3)
    model = keras.Model([inputs, weights], keras.layers.Dense(1)(output))
    model.compile("adagrad", "mse")
    ids = tf.ragged.constant([[5, 6], [7, 8]], dtype=tf.int64)
    factors = tf.ragged.constant([[1.0, 2.0], [3.0, 4.0]])
    convert = {
        "dense": lambda tensor: tensor.to_tensor(),
        "ragged": lambda tensor: tensor,
        "sparse": lambda tensor: tensor.to_sparse(),
    }[kind]
    x = {"ids": convert(ids), "weights": convert(factors)}
    batches = tf.data.Dataset.from_tensors((x, tf.ones((2, 1))))
    model.fit(batches, shuffle=False, verbose=0)
    assert layer.num_rows == 4
    assert model.predict(batches, verbose=0).shape == (2, 1)


def test_masks_reach_the_next_layer():
    inputs = keras.Input((None,), dtype="string")
    layer = small(mask_zero=True)
    model = keras.Model(inputs, keras.layers.GlobalAveragePooling1D()(layer(inputs)))
    result = model(tf.constant([["a", "b", ""]]))[0]
    np.testing.assert_allclose(result, layer.rows(["a", "b"]).mean(0), rtol=1e-5)


def test_mixed_precision():
    ids, labels, different = data()
    layer = small(dtype="mixed_bfloat16")
    model = eager_model_of(layer)
    train(model, ids, labels)
    assert layer(ids).dtype == model.layers[0].output.dtype == "bfloat16"
    assert layer.rows(different).dtype == np.float32
    pooled = small(dtype="mixed_bfloat16", combiner="mean")
    assert pooled(ids).dtype == "bfloat16"


def test_the_regularizer_counts_the_rows_that_there_are():
    layer = small(embeddings_regularizer=keras.regularizers.L2(0.5))
    layer(id_tensor([7, 8]), training=True)
    expected = 0.5 * np.sum(np.square(layer.rows([7, 8])))
    assert float(layer.losses[0]) == pytest.approx(expected, rel=1e-5)


def test_a_layer_that_is_not_trainable_makes_no_rows():
    ids, labels, different = data()
    layer = small()
    layer.trainable = False
    first = layer_built(layer).rows(different)
    train(eager_model_of(layer), ids, labels)
    assert layer.num_rows == 0
    np.testing.assert_array_equal(layer.rows(different), first)
    assert layer.trainable_variables == []


def test_a_full_table_refuses_new_rows(caplog):
    ids, labels, different = data()
    layer = small(max_rows=10)
    first = layer_built(layer).rows(different)
    with caplog.at_level(logging.WARNING, "kerasps"):
        train(model_of(layer, optimizer="sgd"), ids, labels, epochs=2)
    assert layer.num_rows == 10
    assert next(layer.items())[0].tolist() == different[:10]
    rows = layer.rows(different)
    assert not np.any(np.all(rows[:10] == first[:10], axis=1))
    np.testing.assert_array_equal(rows[10:], first[10:])
    assert layer._local.num_refused > 0
    messages = [record.getMessage() for record in caplog.records if record.name == "kerasps"]
    assert len(messages) == 1
    assert "is full: it has 10 rows, which is max_rows" in messages[0]


def test_a_nearly_full_table_is_reported_once(caplog):
    layer = small(max_rows=10)
    with caplog.at_level(logging.WARNING, "kerasps"):
        for number in range(9):
            layer(id_tensor([number]), training=True)
            assert len(caplog.records) == (number == 8)
    assert "nearly full: it has 9 rows, and room for 10" in caplog.records[0].getMessage()


def test_without_max_rows_a_full_table_is_an_error(monkeypatch):
    monkeypatch.setattr(local_places, "DEFAULT_PLACES", 5)
    layer = small(max_rows=None)
    layer(id_tensor([1, 2, 3, 4]), training=True)
    with pytest.raises(tf.errors.InvalidArgumentError, match="with a larger `max_rows`"):
        layer(id_tensor([4, 5, 6]), training=True)
    ids, labels, _ = data()
    with pytest.raises(tf.errors.InvalidArgumentError, match="with a larger `max_rows`"):
        train(model_of(layer), ids, labels)
    assert next(layer.items())[0].tolist() == [1, 2, 3, 4]


def test_rows_can_be_loaded():
    layer = layer_built(small())
    layer(id_tensor([7]), training=True)
    layer.load_rows([9, 7], np.ones((2, 3)))
    layer.load_rows(["a"], [[1, 2, 3]])
    np.testing.assert_array_equal(layer.rows([7, 9]), np.ones((2, 3)))
    np.testing.assert_array_equal(layer.rows(["a"]), [[1, 2, 3]])
    assert layer.num_rows == 3
    layer.load_rows([], np.zeros((0, 3)))
    assert layer.rows([]).shape == (0, 3)


def test_rows_are_iterated_over_in_pieces():
    layer = layer_built(small())
    assert list(layer.items()) == []
    layer.load_rows(range(7), np.arange(21).reshape(7, 3))
    pieces = list(layer.items(batch=3))
    assert [len(ids) for ids, _ in pieces] == [3, 3, 1]
    np.testing.assert_array_equal(np.concatenate([ids for ids, _ in pieces]), range(7))
    np.testing.assert_array_equal(pieces[2][1], [[18, 19, 20]])


def test_a_seed_is_drawn_and_kept():
    keras.utils.set_random_seed(5)
    drawn = DynamicEmbedding(2)
    keras.utils.set_random_seed(5)
    again = DynamicEmbedding(2)
    assert drawn.seed == again.seed != DynamicEmbedding(2).seed
    assert drawn.get_config()["seed"] == drawn.seed


def test_the_configuration_makes_the_same_layer():
    layer = DynamicEmbedding(
        2,
        keras.initializers.RandomUniform(-1, 1),
        keras.regularizers.L1(0.5),
        mask_zero=True,
        combiner="sqrtn",
        max_rows=10,
        dtype="float64",
        name="table",
        trainable=False,
    )
    copy = DynamicEmbedding.from_config(layer.get_config())
    assert copy.get_config() == layer.get_config()
    assert (copy.combiner, copy.max_rows, copy.trainable) == ("sqrtn", 10, False)
    ids = [1, "a"][:1]
    np.testing.assert_array_equal(layer_built(copy).rows(ids), layer_built(layer).rows(ids))


def test_a_cloned_model_has_the_same_first_rows_and_takes_the_weights():
    ids, labels, different = data()
    model = eager_model_of(small(seed=None))
    first = model.layers[0].rows(different)
    train(model, ids, labels)
    clone = keras.models.clone_model(model)
    clone.compile(run_eagerly=True)
    assert clone.layers[0].num_rows == 0
    np.testing.assert_array_equal(clone.layers[0].rows(different), first)
    clone.predict(ids, verbose=0)
    clone.set_weights(model.get_weights())
    np.testing.assert_array_equal(clone.predict(ids, verbose=0), model.predict(ids, verbose=0))
    assert clone.layers[0].num_rows == len(different)


def test_earlier_weights_bring_back_the_earlier_table():
    ids, labels, _ = data()
    others = ids + 25
    layer = small()
    model = eager_model_of(layer)
    train(model, ids, labels)
    weights, answers = model.get_weights(), model.predict(others, verbose=0)
    num_rows = layer.num_rows
    train(model, others, labels)
    later, later_answers = model.get_weights(), model.predict(others, verbose=0)
    assert layer.num_rows > num_rows
    # As EarlyStopping does.
    model.set_weights(weights)
    assert layer.num_rows == num_rows
    np.testing.assert_array_equal(model.predict(others, verbose=0), answers)
    train(model, others[::-1], labels)
    model.set_weights(later)
    np.testing.assert_array_equal(model.predict(others, verbose=0), later_answers)


def by_weights_file(model, folder):
    model.save_weights(folder / "model.weights.h5")
    copy = keras.models.clone_model(model)
    copy.load_weights(folder / "model.weights.h5")
    for each in (model, copy):
        each.compile("adam", "mse", run_eagerly=True)
    return copy


def by_keras_file(model, folder):
    model.save(folder / "model.keras")
    return keras.models.load_model(folder / "model.keras")


def by_checkpoint(model, folder):
    path = tf.train.Checkpoint(model=model).save(folder / "checkpoint")
    copy = eager_model_of(DynamicEmbedding.from_config(model.layers[0].get_config()))
    tf.train.Checkpoint(model=copy).restore(path)
    return copy


@pytest.mark.parametrize("copied", [by_weights_file, by_keras_file, by_checkpoint])
def test_training_goes_on_alike_from_a_file(copied, tmp_path):
    ids, labels, different = data()
    model = eager_model_of(small())
    train(model, ids, labels)
    copy = copied(model, tmp_path)
    assert copy.layers[0].num_rows == model.layers[0].num_rows
    for each in (model, copy):
        train(each, ids + 9, labels, epochs=2)
    different = sorted({*different, *(number + 9 for number in different)})
    assert copy.layers[0].num_rows == model.layers[0].num_rows == len(different)
    np.testing.assert_array_equal(copy.layers[0].rows(different), model.layers[0].rows(different))


def test_a_file_has_ids_in_their_order_and_their_rows(tmp_path):
    layer = small()
    model = eager_model_of(layer, num_ids=3)
    model.save_weights(tmp_path / "empty.weights.h5")
    layer.load_rows([5, -7, 6], np.arange(9).reshape(3, 3))
    model.save_weights(tmp_path / "model.weights.h5")
    with h5py.File(tmp_path / "model.weights.h5") as file:
        group = file["layers/dynamic_embedding/vars"]
        assert group["ids"][:].tolist() == [-7, 5, 6]
        assert group["rows"][:].tolist() == [[3, 4, 5], [0, 1, 2], [6, 7, 8]]
        assert sorted(group) == ["ids", "rows"]
    model.load_weights(tmp_path / "model.weights.h5")
    assert next(layer.items())[0].tolist() == [-7, 5, 6]
    np.testing.assert_array_equal(layer.rows([5, 6]), [[0, 1, 2], [6, 7, 8]])
    model.load_weights(tmp_path / "empty.weights.h5")
    assert layer.num_rows == 0


READER = """
import sys
sys.modules["kerasps"] = None  # no import finds it
import numpy as np
import tensorflow as tf
model = tf.saved_model.load(sys.argv[1])
np.save(sys.argv[2], model.serve(tf.constant(np.load(sys.argv[3]))))
"""


def test_tensorflow_alone_serves_an_export(tmp_path):
    ids, labels, _ = data()
    model = model_of(small())
    train(model, ids, labels)
    model.export(tmp_path / "export", verbose=False)
    # Most of these ids have no row.
    strange = np.concatenate([ids, ids * 1000])
    np.save(tmp_path / "ids.npy", strange)
    (tmp_path / "read.py").write_text(READER)
    paths = [tmp_path / name for name in ("read.py", "export", "rows.npy", "ids.npy")]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1", "PYTHONPATH": ""}
    subprocess.run([sys.executable, *map(str, paths)], check=True, env=environment, cwd=tmp_path)
    np.testing.assert_array_equal(
        np.load(tmp_path / "rows.npy"), model.predict(strange, verbose=0, batch_size=len(strange))
    )


# What is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"output_dim": 0}, "of at least 1. Received: output_dim=0. Give a whole number, such as"),
        ({"output_dim": True}, "Received: output_dim=True"),
        ({"output_dim": "8"}, "Received: output_dim='8'"),
        ({"combiner": "max"}, "Expected: 'sum', 'mean', 'sqrtn' or None. Received: combiner='max'"),
        ({"max_rows": 0}, "a whole number from 1 to 2,147,483,646. Received: max_rows=0"),
        ({"max_rows": 2**31 - 1}, "Received: max_rows=2147483647. Give a whole number, or None"),
        ({"seed": 1.5}, "Expected: a whole number. Received: seed=1.5"),
    ],
)
def test_arguments_that_cannot_be_used(options, message):
    with pytest.raises(kerasps.InputError, match="of a DynamicEmbedding") as error:
        DynamicEmbedding(**{"output_dim": 4, **options})
    assert message in str(error.value)


def test_an_initializer_that_cannot_be_used_is_refused_at_once():
    with pytest.raises(kerasps.UnsupportedError, match="Received: Orthogonal"):
        DynamicEmbedding(4, "orthogonal")


def test_other_strategies_are_refused():
    with (
        tf.distribute.OneDeviceStrategy("CPU:0").scope(),
        pytest.raises(kerasps.UnsupportedError, match=r"none\. Received: OneDevice"),
    ):
        small().build()


RAGGED_IDS, RAGGED_WEIGHTS = bags()


@pytest.mark.parametrize(
    ("combiner", "ids", "weights", "message"),
    [
        (None, tf.zeros((2, 2)), None, r"Received: float32\. Give the model an input such as"),
        (None, keras.KerasTensor((2,), "float32"), None, "integers or strings. Received: float32"),
        (None, RAGGED_IDS.to_sparse(), None, "Received: a sparse tensor. Give the layer"),
        (None, RAGGED_IDS, RAGGED_WEIGHTS, "Received: weights and `combiner=None`"),
        ("sum", tf.zeros(3, tf.int64), None, r"Received: a dense tensor of shape \(3,\)"),
        ("sum", tf.sparse.from_dense([[[1]]]), None, r"Received: a sparse tensor of shape \(1, 1"),
        ("sum", RAGGED_IDS, tf.zeros((4, 3)), r"Received: a dense tensor of shape \(4, 3\)"),
        ("sum", tf.zeros((4, 3), tf.int64), tf.zeros((4, 2)), r"in a dense tensor of shape \(4, 3"),
    ],
)
def test_inputs_that_cannot_be_used(combiner, ids, weights, message):
    with pytest.raises(kerasps.InputError, match=message):
        small(combiner=combiner)(ids, weights=weights)


def test_weights_of_other_bags_are_refused():
    with pytest.raises(tf.errors.InvalidArgumentError, match="`weights` and `ids` differ in size"):
        small(combiner="sum")(RAGGED_IDS, weights=RAGGED_WEIGHTS[:, :1])


def test_a_sequential_model_needs_its_input():
    model = keras.Sequential([small(), keras.layers.Flatten(), keras.layers.Dense(1)])
    with pytest.raises(kerasps.InputError, match=r"first layer of a `keras\.Sequential`"):
        model(np.array([[1, 2]]))


def test_a_layer_that_was_not_built_has_no_rows():
    layer = small(name="users")
    assert layer.num_rows == 0
    for use in (lambda: layer.rows([1]), layer.items, lambda: layer.load_rows([], [])):
        with pytest.raises(kerasps.InputError):
            use()
    with pytest.raises(kerasps.InputError, match="The layer 'users' has no table yet"):
        layer.rows([1])


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda layer: layer.rows([[1, 2]]), r"Received: an array of shape \(1, 2\). Flatten"),
        (lambda layer: layer.rows([1.5]), "Received: float64"),
        (lambda layer: layer.items(batch=0), "of at least 1. Received: batch=0"),
        (lambda layer: layer.load_rows([1], [1, 2, 3]), r"shape \(1, 3\). Received: rows=an array"),
        (
            lambda layer: layer.load_rows([1, 1], np.ones((2, 3))),
            "Expected: each id once. Received: ids=2 ids, 1 of them different",
        ),
        (
            lambda layer: layer.load_rows(range(101), np.ones((101, 3))),
            "at most 100 rows. Received: 101. Make the layer with max_rows=101",
        ),
    ],
)
def test_rows_that_cannot_be_used(use, message):
    layer = layer_built(small())
    with pytest.raises(kerasps.InputError, match=message):
        use(layer)
    assert layer.num_rows == 0


@pytest.mark.parametrize(
    ("store", "message"),
    [
        ({"0": np.ones((5, 3))}, "Expected: ids and rows. Received: 0. Load the file"),
        ({}, "Received: nothing"),
        (
            {"ids": np.arange(2), "rows": np.ones((2, 4))},
            r"Expected: shape \(2, 3\). Received: shape \(2, 4\)",
        ),
        (
            {"ids": np.array([1, 1]), "rows": np.ones((2, 3))},
            "Received: 2 ids, 1 of them different",
        ),
        ({"ids": np.arange(101), "rows": np.ones((101, 3))}, "Received: 101. Make the layer"),
    ],
)
def test_files_that_cannot_be_used(store, message):
    layer = layer_built(small())
    layer.load_rows([5], np.ones((1, 3)))
    with pytest.raises(kerasps.InputError, match=message):
        layer.load_own_variables(store)
    assert next(layer.items())[0].tolist() == [5]


def test_the_public_name_is_that_of_the_package():
    assert DynamicEmbedding.__module__ == "kerasps.layers"
    assert keras.saving.get_registered_name(DynamicEmbedding) == "kerasps>DynamicEmbedding"
    assert Path(kerasps.__file__).parent == Path(local_places.__file__).parents[2]


@pytest.mark.parametrize("combiner", [None, "sum"])
def test_ids_that_a_layer_computes_are_taken(combiner):
    ids = keras.Input((3,), dtype="int64")
    weights = None if combiner is None else keras.Input((3,))
    # Keras calls the product of a symbolic tensor and a number sparse.
    rows = DynamicEmbedding(2, "ones", combiner=combiner)(ids * 2, weights)
    assert rows.shape == ((None, 3, 2) if combiner is None else (None, 2))


class InEach(keras.layers.Layer):
    """Calls a table for each example, in the manner of a map."""

    def __init__(self, table, mapped):
        super().__init__()
        self.table, self.mapped = table, mapped

    def call(self, ids):
        return self.mapped(self.table, ids)


def test_a_vectorized_map_is_refused_by_name():
    ids = tf.constant([[1, 2], [3, 4]], tf.int64)
    layer = DynamicEmbedding(2, max_rows=9, name="items")
    layer.build()

    def mapped(table, ids):
        return tf.vectorized_map(table, ids)

    with pytest.raises(
        kerasps.UnsupportedError, match=r"'items' is called in a `tf\.vectorized_map`"
    ):
        mapped(layer, ids)
    with pytest.raises(kerasps.UnsupportedError, match="'items' is called in a"):
        keras.Sequential([keras.Input((2,), dtype="int64"), InEach(layer, mapped)])

    @tf.function
    def in_a_scope(ids):
        with tf.name_scope("loop_body"):
            return layer(ids)

    np.testing.assert_array_equal(in_a_scope(ids), layer(ids))
    after = tf.vectorized_map(lambda rows: 2 * rows, layer(ids))
    np.testing.assert_array_equal(after, 2 * layer(ids))


@pytest.mark.parametrize("name", ["Adam", "Adagrad"])
def test_an_optimizer_from_outside_of_the_scope_is_named(name):
    ids = np.array([[1, 2], [3, 4]])
    strategy = kerasps.CentralStorageStrategy(["CPU:0"])

    def compiled(optimizer):
        table = DynamicEmbedding(2, max_rows=9, name="items")
        model = keras.Sequential([keras.Input((2,), dtype="int64"), table, keras.layers.Flatten()])
        model.compile(optimizer, "mse")
        return model

    outside = keras.optimizers.get(name)
    with strategy.scope():
        model = compiled(outside)
        other = compiled(name)
    with pytest.raises(
        kerasps.UnsupportedError,
        match=r"'.*items/embeddings' was .* CentralStorageStrategy\. Received: one of _Default",
    ):
        model.fit(ids, np.ones((2, 4)), verbose=0)
    other.fit(ids, np.ones((2, 4)), verbose=0)
    assert other.layers[0].num_rows == 4
