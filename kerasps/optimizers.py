"""What kerasps needs to know of a Keras optimizer: its slots, its shared state, and what it may be asked to update in parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras

from kerasps.errors import UnsupportedError
from kerasps.variables import ParameterServerVariable

# Shared state travels with every push to every ps, so it must be small; Keras's own is at most three scalars.
MAX_SHARED_ELEMENTS = 1024

# What they do to one element depends on that element, its gradient and its slots alone; of others, see `coupled.py`.
_ELEMENTWISE = tuple(
    getattr(keras.optimizers, name)
    for name in (
        *("SGD", "RMSprop", "Adam", "AdamW", "Adadelta", "Adagrad", "Adamax", "Nadam", "Ftrl", "Lion"),
        "ScheduleFreeAdamW",
    )
    if hasattr(keras.optimizers, name)
)


def optimizers_of(model: keras.Model) -> list[Any]:
    """The model's optimizer, those that it wraps, and those that a custom model keeps as attributes, also in containers."""
    found: dict[int, Any] = {}

    def add(value: Any) -> None:
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

    add(getattr(model, "optimizer", None))
    for value in list(vars(model).values()):
        add(value)
    return list(found.values())


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
    """Raises UnsupportedError, naming it, if a variable of the optimizer or of what it trains cannot live on a ps."""
    for variable in [*trainable, *optimizer.variables]:
        if not isinstance(variable, ParameterServerVariable):
            raise UnsupportedError(
                "A variable of the training step cannot live on a ps. Expected: variables of Keras (`keras.Variable`, "
                f"`add_weight`). Received: {getattr(variable, 'name', variable)!r}, a {type(variable).__name__}, of optimizer "
                f"{optimizer.name!r}. Make it a `keras.Variable`."
            )


def is_elementwise(optimizer: Any) -> bool:
    """Whether an update of one element is known to depend on that element, its gradient and its slots alone."""
    own = type(optimizer)
    return own._apply_weight_decay is keras.optimizers.SGD._apply_weight_decay and any(
        own.update_step is known.update_step for known in _ELEMENTWISE
    )


def has_uniform_updates(optimizer: Any) -> bool:
    """Whether an update of two variables is one of both laid end to end, but for weight decay, which may exclude some."""
    return is_elementwise(optimizer) and not optimizer.gradient_accumulation_steps and not optimizer.use_ema


def _is_row_wise(variable: ParameterServerVariable) -> bool:
    """Whether the constraint of `variable`, if any, is known to treat each row by itself."""
    constraint = variable._constraint
    if constraint is None or type(constraint) is keras.constraints.NonNeg:
        return True
    norms = (keras.constraints.MaxNorm, keras.constraints.MinMaxNorm, keras.constraints.UnitNorm)
    return type(constraint) in norms and len(variable.shape) > 1 and constraint.axis in (1, -1, [1], [-1], (1,), (-1,))


def is_known_to_treat_rows_alone(optimizer: Any, variable: ParameterServerVariable) -> bool:
    """Whether all that an update does to one row of `variable` is known to follow from that row; else `coupled.py` looks."""
    clips_accumulated = optimizer.gradient_accumulation_steps and optimizer.clipnorm
    return is_elementwise(optimizer) and _is_row_wise(variable) and not clips_accumulated


def may_update_rows(optimizer: Any, sparse_updates: str) -> bool:
    """Whether an optimizer whose updates treat rows alone may be shown the touched rows of a table, and no others.

    Keras's that couple rows elsewhere (Muon, but not in embeddings) move all rows everywhere, as in plain Keras.
    """
    return (
        sparse_updates == "lazy"
        and (is_elementwise(optimizer) or not str(type(optimizer).update_step.__module__).startswith("keras."))
        and not optimizer.gradient_accumulation_steps
        and not (optimizer.use_ema and optimizer.ema_overwrite_frequency)
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
