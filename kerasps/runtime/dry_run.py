"""Stands in for the tasks of a cluster that is not there: a dry run, as `kerasps plan` does it.

In a dry run, what names a ps or a worker runs in this process. A variable knows the ps that it
would be on. One that is large gets no value and no memory: what a script holds is planned without
holding it.
"""

from __future__ import annotations

import contextlib
import math
import threading
from types import TracebackType

import tensorflow as tf

from kerasps.runtime.devices import COORDINATOR_CPU, ps_device

# What is larger has no value in a dry run. Scripts that call a layer once, to build it, need the
# values of smaller ones.
VALUE_BYTES = 1 << 20
# All values together have no more bytes: further variables have none.
ALL_VALUES_BYTES = 256 << 20


class DryRun(threading.local):
    """The dry run of this process.

    Attributes:
        is_active: whether there is one.
        device: the device of the ps, which is not there, that this thread's operations are for;
            None where they are for no ps.
    """

    is_active = False
    _room = ALL_VALUES_BYTES
    device: str | None = None

    @classmethod
    def begin(cls) -> None:
        """Make this process's a dry run, for good. Call before there is a strategy."""
        cls.is_active = True

    def leaves_out(self, shape: tf.TensorShape, dtype: tf.DType) -> bool:
        """Return whether a new variable is left without a value. Call once for each."""
        if not self.is_active:
            return False
        num_bytes = int(math.prod(shape) * dtype.size)
        if num_bytes > min(VALUE_BYTES, DryRun._room):
            return True
        DryRun._room -= num_bytes
        return False


DRY_RUN = DryRun()


class HereInstead:
    """The context of a device of an absent task: operations run in this process.

    Args:
        device: the device of the ps that they are for; None for no ps.
        context: TensorFlow's, of a device of this process.
    """

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
    """Return the device of this process to use for a device, and the ps that it stands in for.

    Args:
        name: the name of a device. Without a job it is one of the task at hand.

    Returns:
        None where the device is to be used that is named.
    """
    spec = tf.DeviceSpec.from_string(name)
    if spec.job is None:
        return None
    if spec.job == "ps":
        return COORDINATOR_CPU, ps_device(spec.task or 0)
    return (COORDINATOR_CPU if spec.job == "worker" else name), None
