"""The replacements of functions that do something for a device."""

from __future__ import annotations

from typing import Any

from kerasps.hooks.in_place import Original
from kerasps.inputs import quickly_deleted
from kerasps.runtime.connected import connected_strategy
from kerasps.step import Compute
from kerasps.variables import current_phase


def is_gpu_available(original: Original) -> bool:
    """`_is_gpu_available`: in a step, return True if the step computes on a GPU.

    Keras checks all devices of the cluster, and uses cuDNN's kernels if any is a GPU.
    """
    phase = current_phase()
    return phase.has_gpu if isinstance(phase, Compute) else bool(original())


def create_dataset(original: Original, *args: object, **kwargs: object) -> Any:
    """`_create_device_dataset`: make an iterator that is deleted quickly.

    It is that of a distributed dataset on each device.
    """
    made = original(*args, **kwargs)
    return made if connected_strategy() is None else quickly_deleted(made)
