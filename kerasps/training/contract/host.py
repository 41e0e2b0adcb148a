"""The strategy as training sees it, whether a coordinator drives the steps or each worker does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, Unpack

import keras
import tensorflow as tf

from kerasps.cluster.members.membership import Membership
from kerasps.inputs import Input, InputArguments
from kerasps.step import Mode, TracedStep
from kerasps.step.contract.host import StepHost
from kerasps.step.tracing.traffic import TrafficMeter
from kerasps.training.contract.dispatching import Dispatching
from kerasps.training.contract.run_meter import RunMeter
from kerasps.training.contract.staleness import StalenessMeter


class Calls(Protocol):
    """The functions that users have scheduled."""

    def settle(self) -> None:
        """Wait until all have returned, since they change variables as steps do."""


class Host(StepHost, Protocol):
    """The strategy as the loop of `fit`, `evaluate` and `predict` sees it."""

    @property
    def traffic_meter(self) -> TrafficMeter:
        """Measures the traffic of `fit`."""

    @property
    def staleness_meter(self) -> StalenessMeter:
        """Measures how stale the updates of `fit` are."""

    @property
    def run_meter(self) -> RunMeter:
        """Counts the steps of each worker, and knows the current loop."""

    @property
    def scheduled_calls(self) -> Calls | None:
        """The functions that users have scheduled; None if the strategy schedules none."""

    @property
    def num_readers(self) -> int:
        """The number of tasks that read an input of `evaluate` or `predict`."""

    @property
    def own_devices(self) -> tuple[str, ...]:
        """The short name of the device that computes in this process, in a tuple."""

    @property
    def why_no_eager_steps(self) -> str | None:
        """The reason why steps cannot run as plain Python in this process; None if they can."""

    def begin_fit(
        self, data: object, callbacks: object, **arguments: Unpack[InputArguments]
    ) -> tuple[Input, Any]:
        """Return the input of a new `fit`, and the callbacks to call in this process.

        Args:
            data: the `x` of `fit`.
            callbacks: the user's callbacks.
            arguments: the arguments of `as_input`.
        """

    def before_steps(
        self, model: keras.Model, mode: Mode, function: TracedStep, data: Input | Sequence[object]
    ) -> None:
        """Note that steps are about to run. Call before any callback.

        Args:
            model: the model.
            mode: the kind of its step.
            function: the step, traced.
            data: the data, or the batches of a method on one batch.
        """

    def dispatcher(
        self,
        model: keras.Model,
        mode: Mode,
        function: TracedStep,
        inputs: Input,
        *,
        collect_interval: float,
    ) -> Dispatching:
        """Return the object that runs the executions of a loop.

        Args:
            model: the model.
            mode: the kind of its step.
            function: the step.
            inputs: the data.
            collect_interval: see `Dispatcher`.
        """


class HostOfWorkers(Host, Protocol):
    """The host in a process that coordinates workers, for the code that sends to workers."""

    @property
    def membership(self) -> Membership:
        """Knows which tasks answer."""

    @property
    def coordinator(self) -> tf.distribute.coordinator.ClusterCoordinator:
        """TensorFlow's coordinator of the strategy."""

    def devices_of(self, worker: int) -> tuple[str, ...]:
        """Return the short names of the devices that compute on a worker."""

    def device_of_calls(self) -> tuple[str, bool]:
        """Return the device of scheduled functions, and whether all workers have it."""


def host_of(model: keras.Model) -> Host:
    """Return the host of the strategy that trains `model`."""
    host: Host = model._distribute_strategy.extended.host
    return host
