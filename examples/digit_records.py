"""The digits in TFRecord files, for the examples that read files."""

from __future__ import annotations

from pathlib import Path

import keras
import tensorflow as tf

import digits

NUM_FILES = 16


def write(directory: Path) -> tuple[str, int]:
    """Write the training digits to NUM_FILES files.

    Returns:
        The pattern of their names, and the number of examples.
    """
    images, labels, _, _ = digits.load()
    for index in range(NUM_FILES):
        with tf.io.TFRecordWriter(str(directory / f"digits-{index:02d}.tfrecord")) as writer:
            for image, label in zip(
                images[index::NUM_FILES], labels[index::NUM_FILES], strict=True
            ):
                features = {
                    "image": tf.train.Feature(float_list=tf.train.FloatList(value=image.ravel())),
                    "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[label])),
                }
                writer.write(
                    tf.train.Example(
                        features=tf.train.Features(feature=features)
                    ).SerializeToString()
                )
    return str(directory / "digits-*.tfrecord"), len(labels)


def batches(files: tf.data.Dataset) -> tf.data.Dataset:
    """Return a dataset that reads several files in parallel.

    Elements are images of shape (batch, 8, 8, 1) and labels of shape (batch,).
    """
    records = files.interleave(
        tf.data.TFRecordDataset, num_parallel_calls=tf.data.AUTOTUNE, deterministic=False
    )
    return (
        records.shuffle(1000)
        .batch(digits.BATCH_SIZE)
        .map(_parse, num_parallel_calls=tf.data.AUTOTUNE)
    )


def build_model() -> keras.Model:
    """Build a dense network on the pixels."""
    layers = [
        keras.Input((8, 8, 1)),
        keras.layers.Flatten(),
        keras.layers.Dense(64, activation="relu"),
        keras.layers.Dense(10),
    ]
    model = keras.Sequential(layers)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.005), loss, metrics=["accuracy"], steps_per_execution=5)
    return model


def print_test_accuracy(model: keras.Model) -> None:
    """Evaluate on the test digits, which are in no file, and print the accuracy."""
    _, _, images, labels = digits.load()
    result = model.evaluate(images, labels, batch_size=120, verbose=0, return_dict=True)
    print(f"test accuracy: {result['accuracy']:.3f} on {len(labels)} digits")


def _parse(records: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    features = {
        "image": tf.io.FixedLenFeature([8, 8, 1], tf.float32),
        "label": tf.io.FixedLenFeature([], tf.int64),
    }
    parsed = tf.io.parse_example(records, features)
    return parsed["image"], parsed["label"]
