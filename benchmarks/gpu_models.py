"""Models that are large enough for a GPU; one code builds them in Keras 3 and in tf_keras."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from models import (
    Arrays,
    Benchmark,
    build_mlp,
    build_transformer,
    mlp_data,
    transformer_data,
    zipf_ids,
)

NUM_TABLES, COLUMNS, DENSE_FEATURES = 26, 16, 13


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


def _of(
    build: Callable[..., Any], data: Callable[..., Arrays], *arguments: Any
) -> tuple[Callable[[Any], Any], Callable[[], Arrays]]:
    return functools.partial(build, *arguments), functools.partial(data, *arguments)


_TABLES = [100_000] * NUM_TABLES
_LARGE = [10_000_000, *[100_000] * (NUM_TABLES - 1)]
_CLASSES = "sparse_categorical_crossentropy"

GPU_BENCHMARKS = {
    "gpu_mlp": Benchmark(functools.partial(build_mlp, 2), mlp_data, "mse", 128, 400),
    "gpu_cnn": Benchmark(_build_cnn, _cnn_data, _CLASSES, 256, 100),
    "gpu_tables": Benchmark(*_of(_build_dlrm, _dlrm_data, _TABLES), "mse", 2048, 100, "Adagrad"),
    "gpu_dlrm": Benchmark(*_of(_build_dlrm, _dlrm_data, _LARGE), "mse", 2048, 50, "Adagrad"),
    "gpu_transformer": Benchmark(build_transformer, transformer_data, _CLASSES, 64, 50),
    "gpu_wide": Benchmark(
        functools.partial(build_mlp, 4, width=2048),
        functools.partial(mlp_data, 2048),
        "mse",
        1024,
        50,
    ),
}
