"""Finds the number of rows that a ps has room for."""

from __future__ import annotations

import contextlib
import functools
import re

import tensorflow as tf

from kerasps.runtime.fetching import fetch
from kerasps.variables.storage.named import on_own_task

# The share of the memory that a reserve may grow to. Nothing of it is used before there are rows.
_SHARE = 0.9
# Where a ps's memory is not known.
_DEFAULT_BYTES = 16 << 30
# oneDNN's allocator keeps some 3% of a reserve resident, and gives no more in sum than the memory.
_ONEDNN_DIVISOR = 8
MOST_PLACES = 2**31 - 2


def places_on(device: str, row_bytes: int) -> int:
    """Return the number of rows of `row_bytes` bytes that a variable on a ps may grow to."""
    # A place has a key of 8 bytes too.
    num_bytes = reserve_bytes(device)
    return max(1 << 16, min(num_bytes // max(row_bytes, 8), MOST_PLACES))


@functools.cache
def reserve_bytes(device: str) -> int:
    """Return the most bytes that one variable on a ps may grow to."""
    texts = [_read(device, path) for path in ("/proc/meminfo", "/sys/fs/cgroup/memory.max")]
    found = [
        *(int(kib) << 10 for kib in re.findall(r"MemTotal:\s+(\d+) kB", texts[0])),
        *(int(number) for number in re.findall(r"^(\d+)$", texts[1].strip())),
    ]
    most = int(_SHARE * min(found, default=_DEFAULT_BYTES))
    return most if _may_reserve_twice(device, most) else most // _ONEDNN_DIVISOR


def _read(device: str, path: str) -> str:
    with contextlib.suppress(tf.errors.OpError), tf.init_scope(), tf.device(device):
        return str(bytes(fetch([tf.io.read_file(path)])[0]).decode())
    return ""


def _may_reserve_twice(device: str, num_bytes: int) -> bool:
    """Return whether the ps reserves memory without taking it."""

    def reserve() -> list[tf.Tensor]:
        def empty() -> tf.Tensor:
            return tf.raw_ops.Empty(shape=[num_bytes >> 20, 1 << 20], dtype=tf.int8, init=False)

        # An element of each is read when there are both. Of a size TensorFlow makes a constant, and
        # frees the first before it makes the second.
        with tf.device(device):
            first = empty()
            with tf.control_dependencies([first]):
                second = empty()
            with tf.control_dependencies([second]):
                return [first[0, 0], second[0, 0]]

    with tf.init_scope():
        function = tf.function(reserve, autograph=False).get_concrete_function()
        try:
            with tf.device(device):
                on_own_task(lambda: fetch(function()), is_repeatable=True)
        except tf.errors.ResourceExhaustedError:
            return False
    return True
