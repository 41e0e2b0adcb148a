"""Trains while MLflow or W&B logs; run as a process by test_libraries.py.

    python logged_training.py LIBRARY MOMENT DIRECTORY

LIBRARY is what logs, and MOMENT is `before` or `after`: when it is told to, with respect to the
strategy. Prints one JSON line: the steps that were done, and what was logged.
"""

from __future__ import annotations

import json
import os
import sys

import keras
import numpy as np
import tensorflow as tf

import kerasps

LIBRARY, MOMENT, DIRECTORY = sys.argv[1:]
os.environ.update(MLFLOW_ALLOW_FILE_STORE="true", WANDB_MODE="offline", WANDB_SILENT="true")
os.chdir(DIRECTORY)

X = np.random.default_rng(0).normal(size=(64, 3)).astype("float32")
Y = X.sum(1, keepdims=True)


def dataset_fn(context):
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(8).repeat()


class Library:
    """What logs."""

    callbacks: tuple = ()

    def begin(self):
        """Call before the strategy, or after it."""

    def end(self, model):
        """Return what was logged."""


class Autolog(Library):
    def begin(self):
        mlflow.keras.autolog()

    def end(self, model):
        (logged,) = mlflow.search_logged_models(output_format="list")
        loaded = mlflow.keras.load_model(f"models:/{logged.model_id}")
        weights = zip(loaded.get_weights(), model.get_weights(), strict=True)
        run = mlflow.last_active_run()
        return {
            "metrics": sorted(run.data.metrics),
            "epochs": run.data.params["epochs"],
            "same_weights": all(np.array_equal(one, other) for one, other in weights),
        }


class MlflowCallback(Library):
    def begin(self):
        self._run = mlflow.start_run()
        self.callbacks = (mlflow.keras.MlflowCallback(),)

    def end(self, model):
        mlflow.end_run()
        run = mlflow.get_run(self._run.info.run_id)
        return {"metrics": sorted(run.data.metrics)}


class Wandb(Library):
    def begin(self):
        self._run = wandb.init(project="test", dir=DIRECTORY)
        self.callbacks = (
            wandb.integration.keras.WandbMetricsLogger(log_freq=2),
            wandb.integration.keras.WandbModelCheckpoint(f"{DIRECTORY}/model-{{epoch}}.keras"),
        )

    def end(self, model):
        summary = dict(self._run.summary)
        self._run.finish()
        return {
            "metrics": sorted(name for name in summary if "loss" in name),
            "epochs": summary["epoch/epoch"],
            "last_batch": summary["batch/batch_step"],
            "files": sorted(name for name in os.listdir() if name.endswith(".keras")),
        }


if LIBRARY == "wandb":
    import wandb
    import wandb.integration.keras

    library: Library = Wandb()
else:
    import mlflow
    import mlflow.keras

    mlflow.set_tracking_uri(f"file:{DIRECTORY}/runs")
    library = {"mlflow_autolog": Autolog, "mlflow_callback": MlflowCallback}[LIBRARY]()


def main():
    if MOMENT == "before":
        library.begin()
    with kerasps.LocalCluster(num_workers=2, num_ps=1) as cluster:
        strategy = kerasps.ParameterServerStrategy(cluster.cluster_resolver)
        if MOMENT == "after":
            library.begin()
        with strategy.scope():
            model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        history = model.fit(
            kerasps.DatasetCreator(dataset_fn),
            steps_per_epoch=8,
            epochs=2,
            validation_data=(X, Y),
            callbacks=list(library.callbacks),
            verbose=0,
        )
        steps = int(model.optimizer.iterations)
        report = {"steps": steps, "epochs_done": len(history.epoch), "logged": library.end(model)}
    print("REPORT", json.dumps(report, default=float))


if __name__ == "__main__":
    main()
