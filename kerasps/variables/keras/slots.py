"""Finds the optimizers of a model, and the variables they keep: slots and shared state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras

from kerasps.errors import UnsupportedError
from kerasps.variables.keras.variable import ParameterServerVariable

# Every push to every ps contains the shared state, so it must be small; in Keras it is at most
# three scalars.
MAX_SHARED_ELEMENTS = 1024


def optimizers_of(model: keras.Model) -> list[Any]:
    """Return all optimizers of a model.

    They are the compiled optimizer, those that it wraps, and those that a custom model has as
    attributes, also in containers.
    """
    found: dict[int, Any] = {}

    def add(value: object) -> None:
        if isinstance(value, keras.optimizers.Optimizer):
            if id(value) not in found:
                found[id(value)] = value
                add(getattr(value, "inner_optimizer", None))
                add(getattr(value, "optimizers", None))
        elif isinstance(value, Mapping):
            for inner in value.values():
                add(inner)
        elif isinstance(value, (list, tuple)):
            for inner in value:
                add(inner)

    # The compiled one first; a user's model may have it as a property.
    add(getattr(model, "optimizer", None))
    for value in list(vars(model).values()):
        add(value)
    return list(found.values())


def shared_state(optimizer: keras.optimizers.Optimizer) -> list[ParameterServerVariable]:
    """Return the optimizer's variables that are not slots: the iterations, a product of momenta.

    The variables of an optimizer that it wraps are not included.
    """
    others = {id(slot) for per_variable in slots_of(optimizer) for slot in per_variable}
    others.update(
        id(v) for v in getattr(getattr(optimizer, "inner_optimizer", None), "variables", ())
    )
    return [v for v in optimizer.variables if id(v) not in others]


def slots_of(optimizer: keras.optimizers.Optimizer) -> list[list[keras.Variable]]:
    """Return the slots of each variable that the optimizer was built with, in that order.

    Keras optimizers keep a slot per variable in lists parallel to the list of variables. The names
    of these lists differ between optimizers, so this function reads every list of that length.
    """
    count = len(optimizer._trainable_variables)
    slots: list[list[keras.Variable]] = [[] for _ in range(count)]
    for name, value in vars(optimizer).items():
        if (
            name in ("_trainable_variables", "_variables")
            or not isinstance(value, (list, tuple))
            or len(value) != count
        ):
            continue
        for index, slot in enumerate(value):
            if isinstance(slot, keras.Variable):
                slots[index].append(slot)
    return slots


def check_optimizer(
    optimizer: keras.optimizers.Optimizer, trainable: Sequence[keras.Variable] = ()
) -> None:
    """Raise `UnsupportedError` if a variable cannot be on a ps."""
    for variable in [*trainable, *optimizer.variables]:
        if not isinstance(variable, ParameterServerVariable):
            raise UnsupportedError(
                "A variable of the training step cannot live on a ps. Expected: variables of "
                "Keras (`keras.Variable`, `add_weight`). Received: "
                f"{getattr(variable, 'name', variable)!r}, a {type(variable).__name__}, of "
                f"optimizer {optimizer.name!r}. Make it a `keras.Variable`."
            )


def move_slots(optimizer: keras.optimizers.Optimizer) -> bool:
    """Move each slot beside its variable. Call before a step is traced.

    Optimizers that do not use Keras's method to make slots may leave them on another ps. Returns
    True if a slot was moved.

    Raises UnsupportedError if the optimizer has large state that belongs to no one variable.
    """
    has_moved = False
    for variable, slots in zip(optimizer._trainable_variables, slots_of(optimizer), strict=True):
        for slot in slots:
            if isinstance(slot, ParameterServerVariable) and not slot.is_beside(variable):
                slot.move_to(variable)
                has_moved = True
    # After the slots. An optimizer may keep slots in another form; then they are among these.
    for variable in shared_state(optimizer):
        if _num_elements(variable) > MAX_SHARED_ELEMENTS:
            raise UnsupportedError(
                f"Optimizer {optimizer.name!r} has state that every ps would need in every step: "
                f"'{variable.path}'. Expected: slots in lists parallel to the variables. Received: "
                f"shape {tuple(variable.shape)}. Keep one slot per variable in a list, in the "
                "order of `build`'s argument."
            )
    return has_moved


def _num_elements(variable: keras.Variable) -> int:
    return (
        int(variable.storage.shape.num_elements())
        if isinstance(variable, ParameterServerVariable)
        else 0
    )
