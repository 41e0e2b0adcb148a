"""The convolutional network of digits_cnn.py on all devices of one machine, without a cluster.

python examples/central_storage.py            # on all GPUs, else on two parts of the CPU
"""

from __future__ import annotations

import argparse

import keras
import tensorflow as tf

import digits
import kerasps
from digits_cnn import build_model


def make_strategy() -> kerasps.CentralStorageStrategy:
    """Return a strategy on all GPUs; without GPUs, on two logical devices of the CPU."""
    if not tf.config.list_physical_devices("GPU"):
        (cpu,) = tf.config.list_physical_devices("CPU")
        parts = [tf.config.LogicalDeviceConfiguration() for _ in range(3)]
        tf.config.set_logical_device_configuration(cpu, parts)
        return kerasps.CentralStorageStrategy(["CPU:1", "CPU:2"], "CPU:0")
    return kerasps.CentralStorageStrategy()


def main() -> None:
    """Train, evaluate, print the device of the variables and the test accuracy."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=6)
    options = parser.parse_args()
    keras.utils.set_random_seed(1)
    train_images, train_labels, test_images, test_labels = digits.load()

    strategy = make_strategy()
    print(strategy)
    with strategy.scope():
        model = build_model()
    # Each batch is divided among the replicas.
    model.fit(train_images, train_labels, batch_size=digits.BATCH_SIZE, epochs=options.epochs)
    result = model.evaluate(test_images, test_labels, batch_size=120, verbose=0, return_dict=True)
    print(f"weights are on {sorted({w.value.device for w in model.trainable_weights})}")
    print(f"test accuracy: {result['accuracy']:.3f} on {len(test_labels)} digits")


if __name__ == "__main__":
    main()
