"""Models that a GPU has something to do for; one code builds them in Keras 3 and in tf_keras."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from models import Arrays, Benchmark, zipf_ids

NUM_TABLES, COLUMNS, DENSE_FEATURES = 26, 16, 13
VOCABULARY, LENGTH, WIDTH = 8000, 128, 256


def _build_cnn(keras: Any) -> Any:
    """Build six convolutions with batch normalisation, of 4.6 MB."""
    layers = keras.layers
    model = keras.Sequential([layers.Input((32, 32, 3))])
    for filters in (64, 128, 256):
        for _ in range(2):
            model.add(layers.Conv2D(filters, 3, padding="same", use_bias=False))
            model.add(layers.BatchNormalization())
            model.add(layers.ReLU())
        model.add(layers.MaxPooling2D())
    model.add(layers.GlobalAveragePooling2D())
    model.add(layers.Dense(10, activation="softmax"))
    return model


def _cnn_data() -> Arrays:
    generator = np.random.default_rng(0)
    return generator.random((1024, 32, 32, 3), dtype="float32"), generator.integers(0, 10, 1024)


def _build_dlrm(heights: list[int], keras: Any) -> Any:
    layers = keras.layers
    numbers = layers.Input((DENSE_FEATURES,))
    ids = [layers.Input((), dtype="int32") for _ in heights]
    vectors = [
        layers.Embedding(height, COLUMNS)(of_table)
        for height, of_table in zip(heights, ids, strict=True)
    ]
    hidden = layers.Concatenate()([layers.Dense(64, activation="relu")(numbers), *vectors])
    for units in (512, 256):
        hidden = layers.Dense(units, activation="relu")(hidden)
    return keras.Model([numbers, *ids], layers.Dense(1)(hidden))


def _dlrm_data(heights: list[int]) -> Arrays:
    generator = np.random.default_rng(0)
    numbers = generator.random((16 * 2048, DENSE_FEATURES), dtype="float32")
    ids = [zipf_ids(generator, height, (len(numbers),)) for height in heights]
    return (numbers, *ids), np.sin(sum(ids))[:, None].astype("float32")


def _build_transformer(keras: Any) -> Any:
    """Build four blocks over 128 tokens, of 29 MB."""
    layers = keras.layers
    tokens = layers.Input((LENGTH,), dtype="int32")
    hidden = layers.Embedding(VOCABULARY, WIDTH)(tokens)
    for _ in range(4):
        attended = layers.MultiHeadAttention(8, WIDTH // 8)(hidden, hidden)
        hidden = layers.LayerNormalization()(layers.Add()([hidden, attended]))
        inner = layers.Dense(4 * WIDTH, activation="relu")(hidden)
        hidden = layers.LayerNormalization()(layers.Add()([hidden, layers.Dense(WIDTH)(inner)]))
    return keras.Model(tokens, layers.Dense(VOCABULARY, activation="softmax")(hidden))


def _transformer_data() -> Arrays:
    generator = np.random.default_rng(0)
    tokens = generator.integers(0, VOCABULARY, (512, LENGTH + 1)).astype("int32")
    return tokens[:, :-1], tokens[:, 1:]


def _build_mlp(width: int, depth: int, keras: Any) -> Any:
    layers = [keras.layers.Dense(width, activation="relu") for _ in range(depth)]
    return keras.Sequential([keras.layers.Input((width,)), *layers, keras.layers.Dense(1)])


def _mlp_data(width: int) -> Arrays:
    x = np.random.default_rng(0).random((4096, width), dtype="float32")
    return x, x.sum(axis=1, keepdims=True)


def _of(
    build: Callable[..., Any], data: Callable[..., Arrays], *arguments: Any
) -> tuple[Callable[[Any], Any], Callable[[], Arrays]]:
    return functools.partial(build, *arguments), functools.partial(data, *arguments)


_TABLES = [100_000] * NUM_TABLES
_LARGE = [10_000_000, *[100_000] * (NUM_TABLES - 1)]
_CLASSES = "sparse_categorical_crossentropy"

GPU_BENCHMARKS = {
    "gpu_mlp": Benchmark(
        functools.partial(_build_mlp, 64, 2), functools.partial(_mlp_data, 64), "mse", 128, 400
    ),
    "gpu_cnn": Benchmark(_build_cnn, _cnn_data, _CLASSES, 256, 100),
    "gpu_tables": Benchmark(*_of(_build_dlrm, _dlrm_data, _TABLES), "mse", 2048, 100, "Adagrad"),
    "gpu_dlrm": Benchmark(*_of(_build_dlrm, _dlrm_data, _LARGE), "mse", 2048, 50, "Adagrad"),
    "gpu_transformer": Benchmark(_build_transformer, _transformer_data, _CLASSES, 64, 50),
    "gpu_wide": Benchmark(
        functools.partial(_build_mlp, 2048, 4), functools.partial(_mlp_data, 2048), "mse", 1024, 50
    ),
}
