"""Draws the view of `kerasps top` on a running training: the picture of docs/monitoring.md.

    python benchmarks/top_picture.py docs/top.svg

A recommender trains with three workers and two ps. Worker 2 is killed and restarts; the script
draws the status when it is back and has done steps.
"""

from __future__ import annotations

import argparse
import io
import os
import threading
import time

os.environ.update(KERAS_BACKEND="tensorflow")

import keras
import numpy as np
from rich.console import Console

import kerasps
from kerasps.tools.cli.live.top_view import view
from kerasps.tools.monitoring.status import described

WIDTH = 132
TABLES = {"users": 200_000, "films": 40_000, "cities": 5_000}
# Long enough for the rates, which are of ten seconds.
SECONDS_BEFORE_LOSS = SECONDS_AFTER = 8.0


class UntilDrawn(keras.callbacks.Callback):
    """Stops the training when the picture is drawn."""

    def __init__(self):
        super().__init__()
        self.is_drawn = False

    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = self.is_drawn


def built():
    inputs, parts = [], []
    for name, rows in TABLES.items():
        ids = keras.Input((4,), dtype="int32", name=f"{name}_ids")
        inputs.append(ids)
        parts.append(keras.layers.Flatten()(keras.layers.Embedding(rows, 16, name=name)(ids)))
    hidden = keras.layers.Dense(64, activation="relu")(keras.layers.Concatenate()(parts))
    model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
    model.compile("adam", "mse")
    return model


def data(examples=40_000):
    rng = np.random.default_rng(0)
    # Few ids are frequent, as in data of people.
    ids = {
        f"{name}_ids": (rng.pareto(1.2, (examples, 4)) * rows / 1000).astype("int32") % rows
        for name, rows in TABLES.items()
    }
    return ids, rng.random(examples).astype("float32")


def draw(cluster, strategy, path):
    """Wait for the training, lose a worker, wait until it is back, and draw."""
    while not strategy.status().workers[2].steps:
        time.sleep(0.2)
    time.sleep(SECONDS_BEFORE_LOSS)
    cluster.kill("worker", 2)
    time.sleep(1.0)
    cluster.restart("worker", 2)
    while strategy.status().workers[2].state != "connected":
        time.sleep(0.2)
    time.sleep(SECONDS_AFTER)
    while (status := strategy.status()).state != "training" or not all(
        worker.executions_in_flight for worker in status.workers
    ):
        time.sleep(0.05)
    console = Console(width=WIDTH, record=True, force_terminal=True, file=io.StringIO())
    console.print(view({**described(repr(strategy), status, {}), "script": "train.py"}, WIDTH))
    console.save_svg(path, title="kerasps top")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", help="the SVG file")
    path = parser.parse_args().path
    with kerasps.LocalCluster(num_workers=3, num_ps=2) as cluster:
        strategy = kerasps.ParameterServerStrategy(
            cluster.cluster_resolver, kerasps.FixedShardsPartitioner(2, min_bytes=1_000_000)
        )
        with strategy.scope():
            model = built()
        until = UntilDrawn()

        def run():
            try:
                draw(cluster, strategy, path)
            finally:
                until.is_drawn = True

        thread = threading.Thread(target=run)
        thread.start()
        x, y = data()
        model.fit(x, y, batch_size=64, epochs=10_000, verbose=0, callbacks=[until])
        thread.join()


if __name__ == "__main__":
    main()
