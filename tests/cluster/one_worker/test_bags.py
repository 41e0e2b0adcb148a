"""Features of several ids an example, pooled: by rows, and equal to plain Keras.

Every form is one that plain Keras 3 trains as it stands.
"""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from support.compare import assert_equal, dataset, train_both
from support.matrix import with_matrix
from support.tables import WIDTH, compiled, is_table

NUM_ROWS = 70
COMBINERS = ["sum", "mean", "sqrtn"]


def bags():
    """The same bags in each form, three of them empty at least; and what to learn of them."""
    generator = np.random.default_rng(0)
    lengths = generator.integers(0, 6, 320)
    lengths[[0, 2, 319]] = 0
    # Squared, so that low ids are frequent and repeat within a batch.
    ids = (generator.random(lengths.sum()) ** 2 * NUM_ROWS).astype("int32")
    weights = generator.uniform(0.1, 1.0, lengths.sum()).astype("float32")
    ragged = tf.RaggedTensor.from_row_lengths(ids, lengths)
    ragged_weights = tf.RaggedTensor.from_row_lengths(weights, lengths)
    forms = {
        "ragged": ragged,
        "ragged, weights": {"ids": ragged, "weights": ragged_weights},
        "sparse": ragged.to_sparse(),
        "sparse, weights": {"ids": ragged.to_sparse(), "weights": ragged_weights.to_sparse()},
        "padded": ragged.to_tensor().numpy(),
        "padded, mask": {
            "ids": ragged.to_tensor().numpy(),
            "weights": tf.sequence_mask(lengths, 5, "float32").numpy(),
        },
    }
    return forms, np.sin(3 * lengths[:, None]).astype("float32")


class Pooled(keras.Model):
    """Pools the rows of its table in a way of its own."""

    def __init__(self, pool, **table):
        super().__init__()
        self.embedding = keras.layers.Embedding(NUM_ROWS, WIDTH, name="table", **table)
        self.embedding.build()
        self.hidden = keras.layers.Dense(4, activation="tanh")
        self.out = keras.layers.Dense(1)
        self.pool = pool

    def call(self, inputs):
        return self.out(self.hidden(self.pool(self.embedding, inputs)))


def segments(reduce):
    def pool(embedding, ragged):
        rows = embedding(ragged.flat_values)
        return reduce(rows, ragged.value_rowids(), ragged.nrows())

    return pool


def safe(combiner="mean", **options):
    def pool(embedding, inputs):
        ids, weights = (
            (inputs["ids"], inputs["weights"]) if isinstance(inputs, dict) else (inputs, None)
        )
        # Keras's variable is none of TensorFlow's, so plain Keras has its value handed over.
        table = embedding.embeddings.value
        return tf.nn.safe_embedding_lookup_sparse(table, ids, weights, combiner=combiner, **options)

    return pool


def sparse(combiner):
    def pool(embedding, ids):
        table = tf.convert_to_tensor(embedding.embeddings)
        sums = tf.nn.embedding_lookup_sparse(table, ids, None, combiner=combiner)
        # It has no row for empty bags at the end of the batch.
        num_bags = tf.cast(ids.dense_shape[0], tf.int32)
        return tf.pad(sums, [[0, num_bags - tf.shape(sums)[0]], [0, 0]])

    return pool


def masked_mean(embedding, inputs):
    mask = inputs["weights"][..., None]
    count = keras.ops.maximum(keras.ops.sum(mask, axis=1), 1)
    return keras.ops.sum(embedding(inputs["ids"]) * mask, axis=1) / count


def ragged_sums(embedding, ids):
    return tf.reduce_sum(embedding(ids), axis=1)


FORMS = {
    "ragged, layer": ("ragged", ragged_sums),
    "ragged, keras.ops.sum": ("ragged", lambda e, ids: keras.ops.sum(e(ids), axis=1)),
    "ragged, keras.ops.segment_sum": (
        "ragged",
        segments(lambda rows, ids, n: keras.ops.segment_sum(rows, ids, num_segments=n)),
    ),
    "ragged, segment mean": ("ragged", segments(tf.math.unsorted_segment_mean)),
    "ragged, segment sqrtn": ("ragged", segments(tf.math.unsorted_segment_sqrt_n)),
    "ragged, gather": ("ragged", lambda e, i: tf.reduce_sum(tf.gather(e.embeddings, i), axis=1)),
    "ragged, embedding_lookup": (
        "ragged",
        lambda e, i: tf.reduce_sum(tf.nn.embedding_lookup(e.embeddings.value, i), axis=1),
    ),
    "ragged, safe": ("ragged", safe("sqrtn")),
    "sparse, safe": ("sparse", safe("mean")),
    **{f"sparse, {c}": ("sparse", sparse(c)) for c in COMBINERS},
    "sparse, safe, fast": ("sparse", safe(allow_fast_lookup=True)),
    "sparse, safe, max_norm": ("sparse", safe(max_norm=0.1)),
    "sparse, safe, default_id": ("sparse", safe(default_id=3)),
    **{f"sparse, weights, {c}": ("sparse, weights", safe(c)) for c in COMBINERS},
    "ragged, weights": ("ragged, weights", safe("mean")),
    "padded, mask": ("padded, mask", masked_mean),
    "padded, einsum": (
        "padded, mask",
        lambda e, x: keras.ops.einsum("bi,bid->bd", x["weights"], e(x["ids"])),
    ),
    "padded, take of the value": (
        "padded",
        lambda e, i: keras.ops.sum(keras.ops.take(e.embeddings.value, i, axis=0), axis=1),
    ),
}


@pytest.mark.parametrize(
    "form",
    with_matrix(
        FORMS,
        # Other combiners of the same look-ups, and forms of the same look-up.
        at_length=[
            *("ragged, gather", "ragged, safe", "sparse, mean", "sparse, safe, default_id"),
            *("sparse, safe", "padded, take of the value", "ragged, weights"),
            *("ragged, keras.ops.sum", "ragged, segment mean", "ragged, segment sqrtn"),
            *("sparse, sum", "sparse, sqrtn", "sparse, safe, fast"),
            *("sparse, weights, sum", "sparse, weights, mean", "padded, einsum"),
            *("ragged, embedding_lookup", "sparse, safe, max_norm"),
        ],
    ),
)
def test_bag_is_read_by_rows_and_equals_plain_keras(strategy, sharded, form):
    sharded(2)
    inputs, pool = FORMS[form]
    forms, y = bags()
    data = forms[inputs], y
    plain, ours = train_both(
        strategy,
        lambda: compiled(Pooled(pool), "adagrad"),
        data,
        steps=20,
        sum_repeated_ids=True,
    )
    assert is_table(ours, ours.embedding.embeddings)
    assert_equal(plain, ours)
    some = dataset(data).take(4)
    np.testing.assert_allclose(
        ours.predict(some, verbose=0), plain.predict(some, verbose=0), atol=1e-5
    )
    assert is_table_of(ours.predict_function, ours.embedding.embeddings)


def is_table_of(function, variable):
    return variable.path in {table.name for table in function.traffic.tables}


def functional(inputs, pooled):
    return compiled(keras.Model(inputs, keras.layers.Dense(1)(pooled)), "adagrad")


def masked_pooling():
    ids = keras.Input((None,), dtype="int32")
    rows = keras.layers.Embedding(NUM_ROWS, WIDTH, mask_zero=True, name="table")(ids)
    return functional(ids, keras.layers.GlobalAveragePooling1D()(rows))


def ragged_input():
    ids = keras.Input((None,), dtype="int32", ragged=True)
    rows = keras.layers.Embedding(NUM_ROWS, WIDTH, name="table")(ids)
    return functional(ids, keras.ops.sum(rows, axis=1))


@pytest.mark.parametrize(("form", "make"), [("padded", masked_pooling), ("ragged", ragged_input)])
def test_functional_model_of_bags_equals_plain_keras(strategy, sharded, form, make):
    sharded(2)
    forms, y = bags()
    ids = forms[form]
    # A mask that leaves nothing is 0 / 0 in Keras's pooling.
    ids = np.concatenate([ids, np.ones_like(ids[:, :1])], axis=1) if form == "padded" else ids
    plain, ours = train_both(strategy, make, (ids, y), steps=20, sum_repeated_ids=True)
    assert is_table(ours, ours.get_layer("table").embeddings)
    assert_equal(plain, ours)


class InPieces(keras.Model):
    """Looks rows up in a table that is a list of variables."""

    def __init__(self):
        super().__init__()
        self.pieces = [
            self.add_weight(shape=(NUM_ROWS // 2, WIDTH), initializer="uniform", name=f"piece_{i}")
            for i in range(2)
        ]
        self.out = keras.layers.Dense(1)

    def call(self, ids):
        return self.out(
            tf.nn.safe_embedding_lookup_sparse([piece.value for piece in self.pieces], ids)
        )


def test_table_in_a_list_of_variables_equals_plain_keras(strategy, sharded):
    sharded(2)
    forms, y = bags()
    plain, ours = train_both(
        strategy,
        lambda: compiled(InPieces(), "adagrad"),
        (forms["sparse"], y),
        steps=20,
        sum_repeated_ids=True,
    )
    assert all(is_table(ours, piece) for piece in ours.pieces)
    assert_equal(plain, ours)


class OfValues(Pooled):
    """Takes gradients with respect to values, as Keras 3 lets a `train_step` do."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = keras.ops.mean(keras.ops.square(self(x, training=True) - y))
        variables = self.trainable_variables
        gradients = tape.gradient(loss, [v.value for v in variables])
        self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return {"loss": loss}


def test_gradients_with_respect_to_values_equal_plain_keras(strategy, sharded):
    sharded(2)
    forms, y = bags()
    plain, ours = train_both(
        strategy,
        lambda: compiled(OfValues(safe()), "adagrad"),
        (forms["ragged"], y),
        steps=20,
        sum_repeated_ids=True,
    )
    assert is_table(ours, ours.embedding.embeddings)
    assert_equal(plain, ours)


@pytest.mark.parametrize(
    ("form", "combiner"), [*zip(["padded", "ragged", "sparse"], COMBINERS, strict=True)]
)
def test_distributed_embedding_of_keras_rs_equals_plain_keras(strategy, sharded, form, combiner):
    keras_rs = pytest.importorskip("keras_rs")
    sharded(2)
    forms, y = bags()
    ids = forms[form]
    other = ids.with_values(ids.values % 40) if form == "sparse" else ids % 40

    class Model(keras.Model):
        """Two features share a table, a third has its own."""

        def __init__(self):
            super().__init__()
            of = keras_rs.layers.TableConfig
            tables = {"a": of("a", NUM_ROWS, WIDTH, combiner=combiner)}
            tables |= {"b": tables["a"], "c": of("c", 40, WIDTH, combiner=combiner)}
            self.embedding = keras_rs.layers.DistributedEmbedding(
                {
                    name: keras_rs.layers.FeatureConfig(name, table, (None, 5), (None, WIDTH))
                    for name, table in tables.items()
                }
            )
            self.out = keras.layers.Dense(1)

        def call(self, inputs):
            pooled = self.embedding(inputs)
            return self.out(keras.ops.concatenate([pooled[name] for name in "abc"], axis=1))

    data = {"a": ids, "b": ids, "c": other}, y
    plain, ours = train_both(
        strategy, lambda: compiled(Model(), "adagrad"), data, steps=20, sum_repeated_ids=True
    )
    tables = [v for v in ours.trainable_variables if "embeddings" in v.path]
    assert len(tables) == 2
    assert all(is_table(ours, table) for table in tables)
    assert_equal(plain, ours)
