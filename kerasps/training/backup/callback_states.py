"""The states of Keras callbacks, which a new process lacks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

# Attributes that a callback sets. The script sets the user's attributes again.
_KNOWN = (
    (
        keras.callbacks.EarlyStopping,
        ("wait", "stopped_epoch", "best", "best_epoch", "best_weights"),
    ),
    (keras.callbacks.ReduceLROnPlateau, ("wait", "best", "cooldown_counter")),
    (keras.callbacks.ModelCheckpoint, ("best",)),
)


def states_of(callbacks: Sequence[keras.callbacks.Callback]) -> list[dict[str, Any] | None]:
    """Return the state of each callback; None for callbacks that are not in the table."""
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
    """Return a NumPy scalar as a Python scalar, which JSON can represent."""
    return value.item() if isinstance(value, np.generic) else value


def restore_states(
    callbacks: Sequence[keras.callbacks.Callback], states: Sequence[Mapping[str, Any] | None]
) -> None:
    """Set callbacks to the states that `states_of` returned.

    Call after `on_train_begin`, in which callbacks reset their state. States of callbacks that the
    script lacks, or has at another place of its list, are ignored.
    """
    for callback, state in zip(callbacks, states, strict=False):
        if state is not None and type(callback).__name__ == state["class"]:
            for name, value in state["values"].items():
                setattr(callback, name, value)
