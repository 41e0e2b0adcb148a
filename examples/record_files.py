"""Digits in many TFRecord files, of which each worker reads its own; or through tf.data service, which reads for all workers.

python examples/record_files.py               # each worker reads every so-manieth file
python examples/record_files.py --service     # workers ask a tf.data service, which hands files out as they are asked for
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import digits
import kerasps
from clusters import strategy

NUM_FILES = 16
BATCH_SIZE = 32


def write_files(directory: Path, images: np.ndarray, labels: np.ndarray) -> str:
    """Writes the examples to NUM_FILES files, the last ones a little shorter, and returns their pattern."""
    for index in range(NUM_FILES):
        with tf.io.TFRecordWriter(str(directory / f"digits-{index:02d}.tfrecord")) as writer:
            for image, label in zip(images[index::NUM_FILES], labels[index::NUM_FILES], strict=True):
                features = {
                    "image": tf.train.Feature(float_list=tf.train.FloatList(value=image.ravel())),
                    "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[label])),
                }
                writer.write(tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString())
    return str(directory / "digits-*.tfrecord")


def parse(records: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Images of shape (batch, 8, 8, 1) and labels of shape (batch,)."""
    features = {"image": tf.io.FixedLenFeature([8, 8, 1], tf.float32), "label": tf.io.FixedLenFeature([], tf.int64)}
    parsed = tf.io.parse_example(records, features)
    return parsed["image"], parsed["label"]


def from_own_files(pattern: str, context: tf.distribute.InputContext) -> tf.data.Dataset:
    """One pass over the files of this worker. The order of files must be the same on all workers until they are dealt out."""
    files = tf.data.Dataset.list_files(pattern, shuffle=False)
    files = files.shard(context.num_input_pipelines, context.input_pipeline_id)
    records = files.interleave(tf.data.TFRecordDataset, num_parallel_calls=tf.data.AUTOTUNE, deterministic=False)
    return records.shuffle(1000).batch(BATCH_SIZE).map(parse, num_parallel_calls=tf.data.AUTOTUNE)


def from_service(pattern: str, target: str) -> tf.data.Dataset:
    """Endless batches that a tf.data service reads; who asks more gets more. A job has a name, so all workers share it."""
    files = tf.data.Dataset.list_files(pattern, shuffle=True).repeat()
    records = files.interleave(tf.data.TFRecordDataset, num_parallel_calls=tf.data.AUTOTUNE, deterministic=False)
    batches = records.shuffle(1000).batch(BATCH_SIZE).map(parse, num_parallel_calls=tf.data.AUTOTUNE)
    mode = tf.data.experimental.service.ShardingPolicy.DYNAMIC
    return batches.apply(tf.data.experimental.service.distribute(mode, target, job_name="digits"))


@contextlib.contextmanager
def data_service() -> str:
    """A tf.data service with two workers in this process; yields its address. Elsewhere it is a job of its own."""
    service = tf.data.experimental.service
    dispatcher = service.DispatchServer()
    address = dispatcher.target.split("://")[1]
    workers = [service.WorkerServer(service.WorkerConfig(dispatcher_address=address)) for _ in range(2)]
    try:
        yield dispatcher.target
    finally:
        for server in (*workers, dispatcher):
            server._stop()


def build_model() -> keras.Model:
    """A dense network on the pixels."""
    layers = [keras.Input((8, 8, 1)), keras.layers.Flatten(), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10)]
    model = keras.Sequential(layers)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.005), loss, metrics=["accuracy"], steps_per_execution=5)
    return model


def main() -> None:
    """Trains, evaluates, prints the test accuracy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--service", action="store_true", help="read through tf.data service")
    options = parser.parse_args()
    keras.utils.set_random_seed(1)
    train_images, train_labels, test_images, test_labels = digits.load()
    with contextlib.ExitStack() as stack:
        pattern = write_files(Path(stack.enter_context(tempfile.TemporaryDirectory())), train_images, train_labels)
        parameter_servers = stack.enter_context(strategy(num_workers=2, num_ps=1))
        with parameter_servers.scope():
            model = build_model()
        if options.service:
            target = stack.enter_context(data_service())
            data = kerasps.DatasetCreator(lambda context: from_service(pattern, target))
            model.fit(data, epochs=options.epochs, steps_per_epoch=len(train_labels) // BATCH_SIZE)
        else:
            data = kerasps.DatasetCreator(lambda context: from_own_files(pattern, context))
            model.fit(data, epochs=options.epochs)  # an epoch is one pass over all files
        result = model.evaluate(test_images, test_labels, batch_size=120, verbose=0, return_dict=True)
    print(f"test accuracy: {result['accuracy']:.3f} on {len(test_labels)} digits")


if __name__ == "__main__":
    main()
