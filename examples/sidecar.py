"""A training with an evaluator beside it, which exports the model of the best checkpoint.

kerasps launch --evaluator "examples/sidecar.py --dir run" examples/sidecar.py --dir run
"""

from __future__ import annotations

import argparse
from pathlib import Path

import keras
import tensorflow as tf

import digits
import kerasps


def build_model() -> keras.Model:
    """Build a network with one hidden layer."""
    model = keras.Sequential(
        [keras.Input((8, 8, 1)), keras.layers.Flatten(), keras.layers.Dense(64, activation="relu")]
    )
    model.add(keras.layers.Dense(10))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.003), loss, metrics=["accuracy"], steps_per_execution=10)
    return model


def train(directory: Path, epochs: int, max_steps: int) -> None:
    """Train on the cluster, and save the weights after each epoch."""
    images, labels, _, _ = digits.load()

    def dataset_fn(context: tf.distribute.InputContext) -> tf.data.Dataset:
        return digits.training_dataset(images, labels, context)

    with kerasps.ParameterServerStrategy().scope():
        model = build_model()
    save = keras.callbacks.ModelCheckpoint(
        directory / "checkpoints" / "epoch-{epoch:02d}.weights.h5", save_weights_only=True
    )
    model.fit(
        kerasps.DatasetCreator(dataset_fn),
        epochs=epochs,
        steps_per_epoch=max_steps,
        callbacks=[save],
    )


def evaluate(directory: Path) -> None:
    """Evaluate checkpoints until the training is over."""
    _, _, images, labels = digits.load()
    best = kerasps.SidecarEvaluatorModelExport(directory / "best.keras", monitor="accuracy")
    evaluator = kerasps.SidecarEvaluator(
        build_model(),
        (images, labels),
        directory / "checkpoints",
        callbacks=[best],
        log_dir=directory / "logs",
    )
    evaluator.start()
    print(f"test accuracy: {best.best:.3f} on {len(labels)} digits")


def main() -> None:
    """Train or evaluate, as TF_CONFIG says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--dir", type=Path, required=True, help="where checkpoints, summaries and the best model go"
    )
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--max-steps", type=int, default=50, help="steps per epoch")
    options = parser.parse_args()
    keras.utils.set_random_seed(1)
    if tf.distribute.cluster_resolver.TFConfigClusterResolver().task_type == "evaluator":
        evaluate(options.dir)
    else:
        train(options.dir, options.epochs, options.max_steps)


if __name__ == "__main__":
    main()
