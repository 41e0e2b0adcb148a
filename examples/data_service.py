"""Digits in many TFRecord files, which a tf.data service reads and sends to the workers.

python examples/data_service.py               # starts a cluster on this machine
kerasps launch examples/data_service.py       # the same, with the cluster around it
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

import keras
import tensorflow as tf

import digit_records
import digits
import kerasps
from clusters import strategy


@contextlib.contextmanager
def data_service() -> Iterator[str]:
    """Yield the address of a tf.data service with two workers in this process.

    In production it is a separate job.
    """
    service = tf.data.experimental.service
    dispatcher = service.DispatchServer()
    address = dispatcher.target.split("://")[1]
    workers = [
        service.WorkerServer(service.WorkerConfig(dispatcher_address=address)) for _ in range(2)
    ]
    try:
        yield dispatcher.target
    finally:
        for server in (*workers, dispatcher):
            server._stop()


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
        data_service() as target,
        strategy(num_workers=2, num_ps=1) as parameter_servers,
    ):
        pattern, num_examples = digit_records.write(Path(directory))

        def dataset_fn(context: tf.distribute.InputContext) -> tf.data.Dataset:
            # A job of a service ends with its data and never starts again. So the data repeats, and
            # the number of steps defines an epoch.
            batches = digit_records.batches(
                tf.data.Dataset.list_files(pattern, shuffle=True).repeat()
            )
            policy = tf.data.experimental.service.ShardingPolicy.DYNAMIC
            # The job has a name, so all workers share it.
            return batches.apply(
                tf.data.experimental.service.distribute(policy, target, job_name="digits")
            )

        with parameter_servers.scope():
            model = digit_records.build_model()
        steps = num_examples // digits.BATCH_SIZE
        model.fit(kerasps.DatasetCreator(dataset_fn), epochs=options.epochs, steps_per_epoch=steps)
        digit_records.print_test_accuracy(model)


if __name__ == "__main__":
    main()
