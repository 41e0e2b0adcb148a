"""The base of all hosts: the part of a strategy that users do not see."""

from __future__ import annotations

import abc
from collections.abc import Callable

import tensorflow as tf

from kerasps.cluster.description.cluster_description import ClusterDescription
from kerasps.cluster.description.protocol import ClusterResolver
from kerasps.cluster.members.reachability import wait_until_reachable
from kerasps.step.tracing.traffic import TrafficMeter
from kerasps.step.updates.lazy_updates import LazyUpdates
from kerasps.strategy_arguments import Partitioner, StrategyOptions
from kerasps.tools.monitoring.reader import MonitoredHost
from kerasps.training.contract.run_meter import RunMeter
from kerasps.training.contract.staleness import StalenessMeter
from kerasps.variables.placing.placing import Extended


class BaseHost(MonitoredHost):
    """Connects a strategy to its cluster, and is its `Host` for training, steps and the status.

    Contract: call `connect`, `make_extended`, `begin`, and then `leave_cluster` or `close`, each
    once and in this order. A host that was never connected needs no `leave_cluster`.
    `make_extended` sets `strategy` and `extended`, and `begin` the meters.

    Attributes:
        connects_to: the tasks that this process connects to, with itself as their chief.
    """

    description: ClusterDescription

    def __init__(
        self,
        description: ClusterDescription,
        connects_to: ClusterDescription,
        options: StrategyOptions,
    ) -> None:
        self.description = description
        self.connects_to = connects_to
        self.options = options
        self.lazy_updates = LazyUpdates()

    # From the first connection to the end

    def wait_for_tasks(self, timeout: float | None) -> None:
        """Wait until every task accepts connections."""
        wait_until_reachable(self.connects_to.server_addresses, timeout)

    @abc.abstractmethod
    def connect(self, protocol: str | None) -> None:
        """Connect this process to the tasks. TensorFlow's constructor calls this."""

    @abc.abstractmethod
    def make_extended(
        self,
        strategy: tf.distribute.ParameterServerStrategy,
        cluster_resolver: ClusterResolver,
        variable_partitioner: Partitioner | None,
    ) -> Extended:
        """Return the object that places the strategy's variables."""

    def begin(self) -> None:
        """Start what runs while the process is connected. Call once it is."""
        self.traffic_meter = TrafficMeter(self.num_ps)
        self.run_meter = RunMeter()
        self.staleness_meter = StalenessMeter(self.extended.fences)

    @abc.abstractmethod
    def leave_cluster(self) -> None:
        """Leave the cluster, since this process ends."""

    def note_closing(self) -> None:
        """Note that the cluster is closing, before its tasks end. May be called twice."""
        return

    @abc.abstractmethod
    def close(self, disconnect: Callable[[], None]) -> None:
        """Leave a closed cluster, while this process continues. Call after `note_closing`."""

    @property
    def num_ps(self) -> int:
        """The number of ps tasks."""
        return len(self.connects_to.jobs["ps"])
