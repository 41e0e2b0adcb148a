"""The names of the devices of a cluster's tasks."""

from __future__ import annotations

import tensorflow as tf

# The coordinator's job for TensorFlow. Every process begins with this name. With another one, the
# process would lose the objects that it made before it connects.
COORDINATOR_JOB = "localhost"
COORDINATOR_TASK = f"/job:{COORDINATOR_JOB}/replica:0/task:0"
COORDINATOR_CPU = f"{COORDINATOR_TASK}/device:CPU:0"


def connected_devices() -> tuple[str, ...]:
    """Return the names of all devices that this process is connected to, including its local ones.

    A task knows only functions that were traced after this process connected to it, so the names
    are a part of the key of each cache of functions.
    """
    return tuple(device.name for device in tf.config.list_logical_devices())


def ps_device(index: int) -> str:
    """Return the name of the device of a ps task that holds variables."""
    return f"/job:ps/replica:0/task:{index}/device:CPU:0"


def ps_index(device: str) -> int:
    """Return the index of the ps task that a device belongs to."""
    return int(tf.DeviceSpec.from_string(device).task)
