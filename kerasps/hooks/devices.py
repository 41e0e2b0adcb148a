"""The replacement of Keras's check for GPUs."""

from __future__ import annotations

from kerasps.hooks.in_place import Original
from kerasps.step import Compute
from kerasps.variables import current_phase


def is_gpu_available(original: Original) -> bool:
    """`_is_gpu_available`: in a step, return True if the step computes on a GPU.

    Keras checks all devices of the cluster, and uses cuDNN's kernels if any is a GPU.
    """
    phase = current_phase()
    return phase.has_gpu if isinstance(phase, Compute) else bool(original())
