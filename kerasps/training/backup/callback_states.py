"""The state of Keras callbacks, which a new process would not have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

# Attributes that a callback itself sets. What the user has set is the script's to say.
_KNOWN = (
    (
        keras.callbacks.EarlyStopping,
        ("wait", "stopped_epoch", "best", "best_epoch", "best_weights"),
    ),
    (keras.callbacks.ReduceLROnPlateau, ("wait", "best", "cooldown_counter")),
    (keras.callbacks.ModelCheckpoint, ("best",)),
)


def states_of(callbacks: Sequence[keras.callbacks.Callback]) -> list[dict[str, Any] | None]:
    """Return what each callback knows; None for those that are not in the table."""
    return [_state_of(callback) for callback in callbacks]


def _state_of(callback: keras.callbacks.Callback) -> dict[str, Any] | None:
    values = {
        name: _plain(getattr(callback, name))
        for kind, names in _KNOWN
        if isinstance(callback, kind)
        for name in names
        if hasattr(callback, name)
    }
    if isinstance(callback, keras.callbacks.SwapEMAWeights):
        # Between epochs the model may have the averages, and the optimizer the weights.
        values["_ema_weights_in_model"] = callback._ema_weights_in_model
    return {"class": type(callback).__name__, "values": values} if values else None


def _plain(value: object) -> Any:
    """Return a scalar of NumPy's as one of Python's, which JSON can hold."""
    return value.item() if isinstance(value, np.generic) else value


def restore_states(
    callbacks: Sequence[keras.callbacks.Callback], states: Sequence[Mapping[str, Any] | None]
) -> None:
    """Give callbacks back what `states_of` returned.

    Call after `on_train_begin`, by which callbacks forget. Callbacks that the script has not, or
    has elsewhere in its list, are passed over.
    """
    for callback, state in zip(callbacks, states, strict=False):
        if state is not None and type(callback).__name__ == state["class"]:
            for name, value in state["values"].items():
                setattr(callback, name, value)
