"""Answers Keras's questions for the devices that there are."""

from __future__ import annotations

from kerasps.hooks.in_place import Original
from kerasps.step import Compute
from kerasps.variables import current_phase


def is_gpu_available(original: Original) -> bool:
    """Keras's `_is_gpu_available`: in a step, whether the step computes on a GPU.

    Keras looks at all devices of the cluster, and takes kernels of cuDNN where it finds a GPU.
    """
    phase = current_phase()
    return phase.has_gpu if isinstance(phase, Compute) else bool(original())
