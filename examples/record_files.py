"""Digits in many TFRecord files; each worker reads some, and an epoch is one pass over all files.

python examples/record_files.py               # starts a cluster on this machine
kerasps launch examples/record_files.py       # the same, with the cluster around it
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import keras
import tensorflow as tf

import digit_records
import kerasps
from clusters import strategy


def main() -> None:
    """Train, evaluate, print the test accuracy."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=8)
    options = parser.parse_args()
    keras.utils.set_random_seed(1)
    with (
        tempfile.TemporaryDirectory() as directory,
        strategy(num_workers=2, num_ps=1) as parameter_servers,
    ):
        pattern, _ = digit_records.write(Path(directory))

        def dataset_fn(context: tf.distribute.InputContext) -> tf.data.Dataset:
            # All workers must see the files in the same order until `shard` distributes them.
            files = tf.data.Dataset.list_files(pattern, shuffle=False)
            return digit_records.batches(
                files.shard(context.num_input_pipelines, context.input_pipeline_id)
            )

        with parameter_servers.scope():
            model = digit_records.build_model()
        model.fit(kerasps.DatasetCreator(dataset_fn), epochs=options.epochs)
        digit_records.print_test_accuracy(model)


if __name__ == "__main__":
    main()
