"""Prepares a model for any of its methods under the strategy."""

from __future__ import annotations

import keras

from kerasps.training.contract.host import Host
from kerasps.variables.keras.adoption import adopt_model, strategy_of


def prepare(model: keras.Model) -> None:
    """Adopt the model if it was made outside of its strategy.

    Wait for functions that were scheduled before, since they change the variables too.
    """
    strategy = strategy_of(model)
    host: Host = strategy.extended.host
    if host.scheduled_calls is not None:
        host.scheduled_calls.wait_until_idle()
    adopt_model(strategy, model)
