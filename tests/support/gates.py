"""A gate in the graph of a step, or of its data: a file that a test removes to open it."""

from __future__ import annotations

import tensorflow as tf


def wait_while_exists(path, is_gated):
    """Return a tensor that is there once a file is not.

    Args:
        path: the file.
        is_gated: a scalar tensor of booleans; False does not wait.
    """

    return _wait(lambda turn: is_gated & _exists(path, turn))


def wait_until_exists(path):
    """Return a tensor that is there once a file is."""
    return _wait(lambda turn: ~_exists(path, turn))


def _exists(path, turn):
    # The name depends on the turn, or TensorFlow would look for the file just once.
    name = tf.strings.join([str(path), tf.strings.substr(tf.strings.as_string(turn), 0, 0)])
    return tf.size(tf.io.matching_files(name)) > 0


def _wait(is_closed):
    (waited,) = tf.while_loop(is_closed, lambda turn: [turn + 1], [tf.constant(0)])
    return waited
