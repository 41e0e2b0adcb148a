"""The strategy as a step sees it: `StepHost`."""

from __future__ import annotations

from typing import Protocol

import keras
import tensorflow as tf

from kerasps.runtime.connected import ClusterHost
from kerasps.step.updates.lazy_updates import LazyUpdates
from kerasps.strategy_arguments import StrategyOptions
from kerasps.variables.placing.placing import Extended


class StepHost(ClusterHost, Protocol):
    """The strategy as a step sees it: its options, its devices, and where its variables are."""

    # The strategy, which is current while a step is traced.
    strategy: tf.distribute.ParameterServerStrategy
    options: StrategyOptions  # the arguments of the strategy
    lazy_updates: LazyUpdates  # tells users of tables that are updated lazily
    extended: Extended  # places the strategy's variables, and knows their locks and lanes

    @property
    def num_workers(self) -> int:
        """The number of workers, including lost ones."""

    def devices_of_workers(self) -> list[tuple[str, ...]]:
        """Return the short names of the computing devices of each worker that runs steps."""


def step_host_of(model: keras.Model) -> StepHost:
    """Return the host of the strategy that trains `model`."""
    host: StepHost = model._distribute_strategy.extended.host
    return host
