"""The base of all hosts: the part of a strategy that users do not see."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any, Unpack

import keras
import tensorflow as tf

from kerasps.cluster.description.cluster_description import ClusterDescription
from kerasps.cluster.description.protocol import ClusterResolver
from kerasps.cluster.members.membership import WorkerInfo
from kerasps.cluster.members.reachability import wait_until_reachable
from kerasps.inputs import Input, InputArguments
from kerasps.step import Mode, TracedStep
from kerasps.step.tracing.traffic import TrafficMeter
from kerasps.step.updates.lazy_updates import LazyUpdates
from kerasps.strategy_arguments import Partitioner, StrategyOptions
from kerasps.training import Dispatching
from kerasps.training.calls.scheduled import ScheduledCalls
from kerasps.training.contract.run_meter import RunMeter
from kerasps.training.contract.staleness import StalenessMeter
from kerasps.variables.placing import Extended


class BaseHost(abc.ABC):
    """Connects a strategy to its cluster, and implements `training.Host` for the training.

    Contract: call `connect`, `make_extended`, `begin`, and then `leave` or `close`, each once and
    in this order. A host that was never connected needs no `leave`.

    Args:
        description: the cluster, as users see it.
        connects_to: the tasks that this process connects to, with itself as their chief.
        options: the arguments of the strategy.

    Attributes:
        strategy: the strategy; set by `make_extended`.
        extended: places its variables; set by `make_extended`.
        lazy_updates: tells users of tables that are updated lazily.
        traffic_meter: measures the traffic of `fit`; set by `begin`.
        staleness_meter: measures how stale updates are; set by `begin`.
        run_meter: counts the steps of each worker; set by `begin`.
        scheduled_calls: the functions that users have scheduled; None if this host schedules none.
        why_no_eager_steps: the reason why steps cannot run as plain Python; None if they can.
    """

    strategy: tf.distribute.ParameterServerStrategy
    extended: Extended
    traffic_meter: TrafficMeter
    staleness_meter: StalenessMeter
    run_meter: RunMeter
    scheduled_calls: ScheduledCalls | None = None
    why_no_eager_steps: str | None = None

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
        """Wait until every task accepts connections.

        Args:
            timeout: the time limit in seconds; None takes it from `KERASPS_CONNECT_TIMEOUT`.

        Raises:
            TaskUnreachableError: a task does not answer within the time limit.
        """
        wait_until_reachable(self.connects_to.server_addresses, timeout)

    @abc.abstractmethod
    def connect(self, protocol: str | None) -> None:
        """Connect this process to the tasks. TensorFlow's constructor calls this.

        Args:
            protocol: the cluster resolver's protocol, such as "grpc"; None if it names none.
        """

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
    def leave(self) -> None:
        """Leave the cluster, since this process ends."""

    def note_closing(self) -> None:
        """Note that the cluster is closing, before its tasks end. May be called twice."""
        return

    @abc.abstractmethod
    def close(self, disconnect: Callable[[], None]) -> None:
        """Leave a closed cluster, while this process continues. Call after `note_closing`.

        Args:
            disconnect: makes TensorFlow forget the tasks.
        """

    # For errors (see `cluster.ClusterHost`)

    @property
    @abc.abstractmethod
    def after_ps_loss(self) -> str:
        """The advice in the error about a lost ps."""

    @property
    def num_ps(self) -> int:
        """The number of ps tasks."""
        return len(self.connects_to.jobs["ps"])

    @abc.abstractmethod
    def hangs(self, ps: int) -> bool:
        """Return True if a ps counts as lost because it does not answer."""

    # For the status (see `monitoring`)

    @abc.abstractmethod
    def worker_infos(self) -> list[WorkerInfo]:
        """Return the known state of each worker that does steps."""

    @abc.abstractmethod
    def ps_infos(self) -> list[WorkerInfo]:
        """Return the known state of each ps, without asking the ps."""

    @property
    @abc.abstractmethod
    def own_worker(self) -> int | None:
        """The index of the worker that this process is; None for a coordinator."""

    # For the training (see `training.Host`)

    @property
    @abc.abstractmethod
    def num_workers(self) -> int:
        """The number of workers, lost ones included."""

    @property
    @abc.abstractmethod
    def num_readers(self) -> int:
        """The number of tasks that read an input of `evaluate` or `predict`."""

    @property
    @abc.abstractmethod
    def own_devices(self) -> tuple[str, ...]:
        """The short name of the device that computes in this process, in a tuple."""

    @abc.abstractmethod
    def devices_of(self, worker: int) -> tuple[str, ...]:
        """Return the short names of the devices that compute on a worker."""

    @abc.abstractmethod
    def devices_of_workers(self) -> list[tuple[str, ...]]:
        """Return, for each worker that does steps, the short names of its devices that compute."""

    @abc.abstractmethod
    def begin_fit(
        self, data: object, callbacks: object, **arguments: Unpack[InputArguments]
    ) -> tuple[Input, Any]:
        """Return the input of a new `fit`, and the callbacks to call in this process."""

    def before_steps(
        self, model: keras.Model, mode: Mode, function: TracedStep, data: Input | Sequence[object]
    ) -> None:
        """Note that steps are about to run (see `training.Host`)."""
        return

    @abc.abstractmethod
    def dispatcher(
        self,
        model: keras.Model,
        mode: Mode,
        function: TracedStep,
        inputs: Input,
        *,
        collect_interval: float,
    ) -> Dispatching:
        """Return the object that runs the executions of a loop."""
