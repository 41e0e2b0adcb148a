"""The devices of the tasks of a cluster, by name."""

from __future__ import annotations

import tensorflow as tf

# The coordinator's job as TensorFlow knows it. Any other name than this, which every process begins
# with, would make TensorFlow forget what the process has made before it connects.
COORDINATOR_JOB = "localhost"
COORDINATOR_TASK = f"/job:{COORDINATOR_JOB}/replica:0/task:0"
COORDINATOR_CPU = f"{COORDINATOR_TASK}/device:CPU:0"


def connected_devices() -> tuple[str, ...]:
    """Return the names of all devices that this process is connected to, its own among them.

    A task knows only functions that were traced after this process had connected to it, so these
    are a part of the key of each cache of functions.
    """
    return tuple(device.name for device in tf.config.list_logical_devices())


def ps_device(index: int) -> str:
    """Return the name of the device of a ps task on which variables live."""
    return f"/job:ps/replica:0/task:{index}/device:CPU:0"


def ps_index(device: str) -> int:
    """Return the index of the ps task that a device belongs to."""
    return int(tf.DeviceSpec.from_string(device).task)
