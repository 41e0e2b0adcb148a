"""What kerasps needs to know of a Keras optimizer: its slots, its shared state, and what it may be asked to update in parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from kerasps.errors import UnsupportedError
from kerasps.variables import ParameterServerVariable

# Shared state travels with every push to every ps, so it must be small; Keras's own is at most three scalars.
MAX_SHARED_ELEMENTS = 1024

# What they do to one element depends on others: on a norm of the whole variable, its row and column means, its singular values.
_NOT_ELEMENTWISE = tuple(
    getattr(keras.optimizers, name) for name in ("Adafactor", "Lamb", "Muon") if hasattr(keras.optimizers, name)
)


def shared_state(optimizer: Any) -> list[ParameterServerVariable]:
    """The optimizer's variables that belong to no one variable of the model: the iterations, a product of momenta.

    Those of an optimizer that it wraps are not its own.
    """
    others = {id(slot) for per_variable in slots_of(optimizer) for slot in per_variable}
    others.update(id(v) for v in getattr(getattr(optimizer, "inner_optimizer", None), "variables", ()))
    return [v for v in optimizer.variables if id(v) not in others]


def slots_of(optimizer: Any) -> list[list[keras.Variable]]:
    """The slots of each variable that the optimizer was built with, in that order.

    Keras optimizers keep a slot per variable in lists that run parallel to the variables.
    """
    count = len(optimizer._trainable_variables)
    slots: list[list[keras.Variable]] = [[] for _ in range(count)]
    for name, value in vars(optimizer).items():
        if name in ("_trainable_variables", "_variables") or not isinstance(value, (list, tuple)) or len(value) != count:
            continue
        for index, slot in enumerate(value):
            if isinstance(slot, keras.Variable):
                slots[index].append(slot)
    return slots


def check_optimizer(optimizer: Any, trainable: Sequence[Any] = ()) -> None:
    """Raises UnsupportedError, naming it, if a variable of the optimizer or of what it trains is not on a ps."""
    for variable in [*trainable, *optimizer.variables]:
        if not isinstance(variable, ParameterServerVariable):
            raise UnsupportedError(
                "A variable of the training step does not live on a ps. Expected: model and optimizer made under "
                f"`strategy.scope()`. Received: {getattr(variable, 'path', variable)!r} of optimizer {optimizer.name!r}, made "
                "outside it. Make the optimizer, or call `model.compile`, inside `with strategy.scope():`."
            )


def is_elementwise(optimizer: Any) -> bool:
    """Whether an update of one element depends on that element, its gradient and its slots alone.

    Only then may rows, or shards, be updated by themselves. Of an optimizer that is not Keras's, it is taken to be so where all
    its slots have the shapes of their variables.
    """
    if isinstance(optimizer, _NOT_ELEMENTWISE):
        return False
    pairs = zip(optimizer._trainable_variables, slots_of(optimizer), strict=True)
    return all(slot.storage.shape == variable.storage.shape for variable, slots in pairs for slot in slots)


def has_uniform_updates(optimizer: Any) -> bool:
    """Whether an update of two variables is one of both laid end to end, but for weight decay, which may exclude some.

    So it is for Keras's own elementwise optimizers; another's `update_step` may tell variables apart.
    """
    return (
        str(type(optimizer).update_step.__module__).startswith("keras.")
        and not optimizer.gradient_accumulation_steps
        and not optimizer.use_ema
        and is_elementwise(optimizer)
    )


def is_row_wise(constraint: Any) -> bool:
    """Whether a constraint treats each row of a matrix by itself, so that it may be applied to some of them."""
    if constraint is None or type(constraint) is keras.constraints.NonNeg:
        return True
    norms = (keras.constraints.MaxNorm, keras.constraints.MinMaxNorm, keras.constraints.UnitNorm)
    return type(constraint) in norms and constraint.axis in (1, -1, [1], [-1], (1,), (-1,))


def updates_rows(optimizer: Any, variable: ParameterServerVariable, sparse_updates: str) -> bool:
    """Whether the optimizer may be shown the touched rows of a table alone; False means the whole table."""
    return (
        sparse_updates == "lazy"
        and not optimizer.gradient_accumulation_steps
        and not (optimizer.use_ema and optimizer.ema_overwrite_frequency)
        and is_elementwise(optimizer)
        and is_row_wise(variable.constraint)
    )


def check_shards(optimizer: Any, variable: ParameterServerVariable) -> None:
    """Raises UnsupportedError, naming what it is, if the optimizer cannot update the shards of `variable` one by one."""
    if variable.sharding is None:
        return
    shards = f"'{variable.path}', which is in {len(variable.shards)} shards"
    mend = "Leave the variable whole: with a partitioner's `min_bytes` or `min_shard_bytes`, or without `variable_partitioner`"
    if not is_elementwise(optimizer):
        raise UnsupportedError(
            f"Optimizer {optimizer.name!r} updates an element by others of its variable, and no ps has all of a variable in "
            f"shards. Expected: an elementwise optimizer, such as Adam or Adagrad. Received: {type(optimizer).__name__} for "
            f"{shards}. {mend}."
        )
    if not is_row_wise(variable.constraint):
        raise UnsupportedError(
            f"A constraint couples rows that lie on different ps. Expected: one that treats each row by itself (NonNeg, or a "
            f"norm with axis=1). Received: {type(variable.constraint).__name__} of {shards}. {mend}."
        )
    if optimizer.gradient_accumulation_steps and optimizer.clipnorm:
        raise UnsupportedError(
            "`clipnorm` with `gradient_accumulation_steps` needs the norm of the accumulated gradient, and no ps has all of "
            f"it. Expected: one of the two, or `clipvalue`. Received: both, for {shards}. {mend}."
        )


def move_slots(optimizer: Any) -> None:
    """Brings each slot beside its variable; optimizers that make slots in their own way leave them elsewhere."""
    for variable, own in zip(optimizer._trainable_variables, slots_of(optimizer), strict=True):
        for slot in own:
            if isinstance(slot, ParameterServerVariable) and not slot.lies_beside(variable):
                slot.move_to(variable)
    for variable in shared_state(optimizer):
        if _num_elements(variable) > MAX_SHARED_ELEMENTS:
            raise UnsupportedError(
                f"Optimizer {optimizer.name!r} has state that every ps would need in every step: '{variable.path}'. Expected: "
                f"slots in lists parallel to the variables. Received: shape {tuple(variable.shape)}. Keep one slot per "
                "variable in a list, in the order of `build`'s argument."
            )


def _num_elements(variable: keras.Variable) -> int:
    return int(variable.storage.shape.num_elements()) if isinstance(variable, ParameterServerVariable) else 0
