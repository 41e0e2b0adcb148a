"""The Keras optimizers that can update an element, or a row, without the others."""

from __future__ import annotations

from collections.abc import Sequence

import keras

from kerasps.errors import UnsupportedError
from kerasps.variables import ParameterServerVariable

# Their update of an element depends only on that element, its gradient and its slots; for others,
# see `coupling.py`.
_ELEMENTWISE = (
    keras.optimizers.SGD,
    keras.optimizers.RMSprop,
    keras.optimizers.Adam,
    keras.optimizers.AdamW,
    keras.optimizers.Adadelta,
    keras.optimizers.Adagrad,
    keras.optimizers.Adamax,
    keras.optimizers.Nadam,
    keras.optimizers.Ftrl,
    keras.optimizers.Lion,
    # Not in every supported version of Keras.
    *filter(None, [getattr(keras.optimizers, "ScheduleFreeAdamW", None)]),
)


def is_keras_method(kind: type, method: str) -> bool:
    """Return whether a class has the method from Keras, and no subclass overrides it."""
    return str(getattr(kind, method).__module__).startswith("keras.")


def is_elementwise(optimizer: keras.optimizers.Optimizer) -> bool:
    """Return True if an optimizer is known to update each element independently.

    That is, from the element, its gradient and its slots alone.
    """
    kind = type(optimizer)
    return kind._apply_weight_decay is keras.optimizers.SGD._apply_weight_decay and any(
        kind.update_step is known.update_step for known in _ELEMENTWISE
    )


def has_uniform_updates(optimizer: keras.optimizers.Optimizer) -> bool:
    """Return True if updating two concatenated variables equals updating each.

    The caller separates variables by weight decay, which may exclude some.
    """
    return (
        is_elementwise(optimizer)
        and not optimizer.gradient_accumulation_steps
        and not optimizer.use_ema
    )


def is_row_wise(variable: ParameterServerVariable) -> bool:
    """Return True if the constraint of `variable`, if any, is known to treat rows separately."""
    constraint = keras.Variable.constraint.fget(variable)
    if constraint is None or type(constraint) is keras.constraints.NonNeg:
        return True
    norms = (keras.constraints.MaxNorm, keras.constraints.MinMaxNorm, keras.constraints.UnitNorm)
    return (
        type(constraint) in norms
        and len(variable.shape) > 1
        and constraint.axis in (1, -1, [1], [-1], (1,), (-1,))
    )


def is_known_to_treat_rows_alone(
    optimizer: keras.optimizers.Optimizer, variable: ParameterServerVariable
) -> bool:
    """Return True if an update of one row of `variable` is known to depend on that row alone.

    Otherwise, `coupling.py` finds out from the trace of the update.
    """
    clips_accumulated = optimizer.gradient_accumulation_steps and optimizer.clipnorm
    return is_elementwise(optimizer) and is_row_wise(variable) and not clips_accumulated


def moves_rows_without_gradient(
    optimizer: keras.optimizers.Optimizer, table: ParameterServerVariable
) -> bool:
    """Return True if a dense update changes rows of `table` without gradient, or their slots.

    An optimizer that is not one of Keras's counts as such if it has slots.
    """
    kind = type(optimizer)
    if optimizer.use_ema:
        return True  # the average of each row goes on towards the row
    if optimizer.weight_decay and optimizer._use_weight_decay(table):
        return True
    if kind.update_step is keras.optimizers.SGD.update_step:
        return bool(optimizer.momentum)
    if kind.update_step is keras.optimizers.Adagrad.update_step:
        return False
    has_slots = any(variable.shape == table.shape for variable in optimizer.variables)
    return is_keras_method(kind, "update_step") or has_slots


def check_updates_by_rows(
    optimizer: keras.optimizers.Optimizer,
    variables: Sequence[ParameterServerVariable],
    sparse_updates: str,
) -> None:
    """Check that an optimizer can update the tables without a vocabulary, which have some rows.

    Raises UnsupportedError if it changes rows without a gradient.
    """
    for table in variables:
        if not table.has_whole_value:
            _check_updates_by_rows(optimizer, table, sparse_updates)


def _check_updates_by_rows(
    optimizer: keras.optimizers.Optimizer, table: ParameterServerVariable, sparse_updates: str
) -> None:
    if optimizer.gradient_accumulation_steps:
        what, instead = "gradient_accumulation_steps", "Leave it out, or use larger batches."
    elif optimizer.use_ema:
        what, instead = "use_ema=True", "Leave it out."
    elif sparse_updates == "dense" and moves_rows_without_gradient(optimizer, table):
        what = 'sparse_updates="dense"'
        instead = "Leave it out, or take an optimizer that moves no such rows: SGD, Adagrad."
    else:
        return
    raise UnsupportedError(
        f"{type(optimizer).__name__} with `{what}` changes rows that have no gradient, and "
        f"'{table.path}', a table without a vocabulary, has only the rows of ids that came. "
        f"Expected: an update of the rows of a batch alone. Received: `{what}`. {instead}"
    )


def may_update_rows(optimizer: keras.optimizers.Optimizer, sparse_updates: str) -> bool:
    """Return True if an optimizer may update only the touched rows of a table.

    The caller knows that its updates treat rows separately. Keras's optimizers that couple rows of
    other variables (Muon does, but not in embeddings) move all rows of tables, as in plain Keras.
    """
    return (
        sparse_updates == "lazy"
        and (is_elementwise(optimizer) or not is_keras_method(type(optimizer), "update_step"))
        and not optimizer.gradient_accumulation_steps
        and not (optimizer.use_ema and optimizer.ema_overwrite_frequency)
    )
