"""Handwritten digits, 8 x 8 pixels, split into train and test.

Shared by the examples that read digits.
"""

from __future__ import annotations

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

BATCH_SIZE = 32


def load() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return train images, train labels, test images, test labels; pixels from 0 to 1."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).reshape(-1, 8, 8, 1).astype("float32")
    labels = labels.astype("int32")
    train_images, test_images, train_labels, test_labels = train_test_split(
        images, labels, test_size=0.2, random_state=0, stratify=labels
    )
    return train_images, train_labels, test_images, test_labels


def training_dataset(
    images: np.ndarray, labels: np.ndarray, context: tf.distribute.InputContext
) -> tf.data.Dataset:
    """Return one worker's split of the training digits, shuffled and repeated."""
    dataset = tf.data.Dataset.from_tensor_slices((images, labels))
    dataset = dataset.shard(context.num_input_pipelines, context.input_pipeline_id)
    return dataset.shuffle(len(labels)).repeat().batch(BATCH_SIZE, drop_remainder=True).prefetch(2)
