"""Predicts the library of a line of documentation; the model splits raw strings into words.

python examples/docstrings.py                 # starts a cluster on this machine
kerasps launch examples/docstrings.py         # the same, with the cluster around it
"""

from __future__ import annotations

import argparse
import random
import re

import keras
import numpy as np
import pandas as pd
import sklearn.cluster
import sklearn.linear_model
import sklearn.preprocessing
import tensorflow as tf

from clusters import strategy

LIBRARIES = {
    "numpy": [np, np.linalg, np.ndarray, np.ma],
    "pandas": [pd, pd.DataFrame, pd.Series],
    "scikit-learn": [sklearn.cluster, sklearn.linear_model, sklearn.preprocessing],
}
VOCABULARY, WORDS = 4000, 16
WORD = re.compile(r"\b[A-Za-z]{2,}\b")


def load() -> tuple[list[str], list[int]]:
    """Return distinct lines of at least four words, and the number of each line's library."""
    label_of: dict[str, int] = {}
    for label, places in enumerate(LIBRARIES.values()):
        documented = [
            getattr(place, name, None)
            for place in places
            for name in dir(place)
            if not name.startswith("_")
        ]
        lines = [
            line.strip()
            for thing in documented
            for line in str(getattr(thing, "__doc__", "")).splitlines()
        ]
        label_of |= {line: label for line in lines if len(WORD.findall(line)) >= 4}
    lines = sorted(label_of)
    random.Random(1).shuffle(lines)
    return lines, [label_of[line] for line in lines]


def build_model(lines: list[str]) -> keras.Model:
    """Build a layer on the mean of the words' vectors, with the vocabulary of `lines`."""
    vectorize = keras.layers.TextVectorization(VOCABULARY, output_sequence_length=WORDS)
    vectorize.adapt(lines)
    embed = keras.layers.Embedding(VOCABULARY, 32, mask_zero=True)
    dense = [keras.layers.Dense(32, activation="relu"), keras.layers.Dense(len(LIBRARIES))]
    inputs = keras.Input((), dtype="string")
    model = keras.Sequential(
        [inputs, vectorize, embed, keras.layers.GlobalAveragePooling1D(), *dense]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.003), loss, metrics=["accuracy"], steps_per_execution=10)
    return model


def main() -> None:
    """Train, evaluate, print the test accuracy and the predictions for two lines."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()
    keras.utils.set_random_seed(1)
    lines, labels = load()
    train = (
        tf.data.Dataset.from_tensor_slices((lines[2000:], labels[2000:])).shuffle(20_000).batch(64)
    )
    test = tf.data.Dataset.from_tensor_slices((lines[:2000], labels[:2000])).batch(500)
    with strategy(num_workers=2, num_ps=1) as parameter_servers:
        with parameter_servers.scope():
            model = build_model(lines[2000:])
        model.fit(train, epochs=options.epochs)
        _, accuracy = model.evaluate(test, verbose=0)
        asked = ["whether the index of the frame is sorted", "the number of clusters to fit"]
        answers = model.predict(tf.constant(asked), verbose=0).argmax(axis=1)
    for line, answer in zip(asked, answers, strict=True):
        print(f"{line}: {[*LIBRARIES][answer]}")
    print(f"test accuracy: {accuracy:.3f} on 2,000 lines")


if __name__ == "__main__":
    main()
