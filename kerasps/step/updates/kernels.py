"""TensorFlow's kernels that run an optimizer's update in one pass over the values.

Keras's `update_step` is a series of operations, each of which reads and writes all values. A kernel
reads and writes each value once. kerasps uses kernels that give the same bits as Keras's
operations: SGD, plain, with momentum, and with Nesterov momentum. The kernels of Adam do not: they
compute `1 - beta_2` in float32, where 0.001 becomes 0.000999987.
"""

from __future__ import annotations

import keras
import tensorflow as tf

from kerasps.step.updates.updating import UpdatePhase
from kerasps.variables import ParameterServerVariable

# The dtypes in which a kernel rounds as often as Keras's operations do.
_DTYPES = (tf.float32, tf.float64)


def has_kernel(optimizer: keras.optimizers.Optimizer) -> bool:
    """Return True if a kernel may replace the `update_step` of an optimizer."""
    return type(optimizer).update_step is keras.optimizers.SGD.update_step


def update_by_kernel(
    phase: UpdatePhase, variable: ParameterServerVariable, gradient: tf.Tensor
) -> bool:
    """Update `variable` by one kernel instead of `update_step`, if there is one.

    Call while `phase` is entered.

    Returns True if it updated the variable.
    """
    optimizer = phase.optimizer
    if not has_kernel(optimizer):
        return False
    members = [variable]
    if optimizer.momentum:
        members.append(optimizer.momentums[optimizer._get_variable_index(variable)])
    held = [phase.held(member) for member in members]
    dtype = held[0].dtype
    if dtype not in _DTYPES or any(storage.dtype != dtype for storage in held):
        return False
    if not all(isinstance(storage, tf.Variable) for storage in held):
        return False  # rows of a table
    rate, gradient = (tf.cast(value, dtype) for value in (phase.learning_rate, gradient))
    if not optimizer.momentum:
        tf.raw_ops.ResourceApplyGradientDescent(var=held[0].handle, alpha=rate, delta=gradient)
    else:
        # The momentum includes the rate, as in Keras and unlike in `ResourceApplyMomentum`.
        tf.raw_ops.ResourceApplyKerasMomentum(
            var=held[0].handle,
            accum=held[1].handle,
            lr=rate,
            grad=gradient,
            momentum=tf.constant(optimizer.momentum, dtype),
            use_nesterov=optimizer.nesterov,
        )
    return True
