"""Scalars for TensorBoard, without the package `tensorboard`."""

from __future__ import annotations

import tensorflow as tf

_DATA_CLASS_SCALAR = 1


def write_scalar(tag: str, value: float, step: int) -> None:
    """Write a scalar with the default writer, as `tf.summary.scalar` does.

    TensorFlow's function is in the package `tensorboard`, which TensorFlow 2.21 does not require.

    Args:
        tag: its name in TensorBoard.
        value: it is written as float32.
        step: its place on the axis.
    """
    metadata = tf.compat.v1.SummaryMetadata()
    metadata.plugin_data.plugin_name = "scalars"
    metadata.data_class = _DATA_CLASS_SCALAR
    tf.summary.write(tag, tf.constant(value, tf.float32), step=step, metadata=metadata)
