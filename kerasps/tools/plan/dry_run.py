"""Replaces the tasks of a cluster that does not exist, while `kerasps plan` runs a script.

In a dry run, operations on the device of a ps or a worker run in this process. A variable knows the
ps that would hold it. A large variable gets no value and no memory, so that a plan needs less
memory than the model.
"""

from __future__ import annotations

import contextlib
import math
import threading
from types import TracebackType

import tensorflow as tf

from kerasps.runtime.devices import COORDINATOR_CPU, ps_device

# A larger variable has no value in a dry run. Scripts that call a layer once, to build it, need the
# values of smaller ones.
VALUE_BYTES = 1 << 20
# The limit of all values together: variables beyond it have no value.
ALL_VALUES_BYTES = 256 << 20


class PlanError(BaseException):
    """`kerasps plan` cannot plan the script. It is not an `Exception`, so that the script ends.

    A script that handles exceptions would otherwise continue, and might train.
    """


class FirstStepReached(BaseException):
    """Ends a script at its first step. It is not an `Exception`, which a script may handle."""


class DryRun(threading.local):
    """The state of the dry run of this process."""

    _room = ALL_VALUES_BYTES
    # The device of the (missing) ps that this thread's operations are for.
    device: str | None = None

    def leaves_out(self, shape: tf.TensorShape, dtype: tf.DType) -> bool:
        """Return whether a new variable gets no value. Call once for each variable."""
        num_bytes = int(math.prod(shape) * dtype.size)
        if num_bytes > min(VALUE_BYTES, DryRun._room):
            return True
        DryRun._room -= num_bytes
        return False


DRY_RUN = DryRun()


class HereInstead:
    """The device context of a missing task, in which operations run in this process."""

    def __init__(
        self, device: str | None, context: contextlib.AbstractContextManager[object]
    ) -> None:
        self._device = device
        self._context = context
        self._before: list[str | None] = []

    def __enter__(self) -> None:
        self._context.__enter__()
        self._before.append(DRY_RUN.device)
        DRY_RUN.device = self._device

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        DRY_RUN.device = self._before.pop()
        self._context.__exit__(exc_type, exc, traceback)


def here_instead(name: str) -> tuple[str, str | None] | None:
    """Return the device of this process to use for a device, and the ps device that it replaces.

    Returns:
        The device to use, and the device of the ps or None. None if `name` itself can be used.
    """
    spec = tf.DeviceSpec.from_string(name)
    if spec.job is None:
        return None
    if spec.job == "ps":
        return COORDINATOR_CPU, ps_device(spec.task or 0)
    return (COORDINATOR_CPU if spec.job == "worker" else name), None
