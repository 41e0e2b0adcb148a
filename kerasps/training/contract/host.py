"""The strategy as training sees it, whether a coordinator drives the steps or each worker does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, kw_only=True)
class LoopSteps:
    """The steps of a loop."""

    model: keras.Model
    mode: Mode  # the kind of its step
    function: TracedStep  # the step
    inputs: Input  # the data
    # Seconds for which a worker may hold the sum of its results. With 0, each execution returns its
    # result, which costs as much as a small execution.
    collect_interval: float


class Calls(Protocol):
    """The functions that users have scheduled."""

    def wait_until_idle(self) -> None:
        """Wait until all have returned, since they change variables as steps do."""


class Host(StepHost, Protocol):
    """The strategy as the loop of `fit`, `evaluate` and `predict` sees it."""

    traffic_meter: TrafficMeter  # measures the traffic of `fit`
    staleness_meter: StalenessMeter  # measures how stale the updates of `fit` are
    run_meter: RunMeter  # counts the steps of each worker, and knows the current loop
    # The functions that users have scheduled; None if the strategy schedules none.
    scheduled_calls: Calls | None = None
    # The reason why steps cannot run as plain Python in this process; None if they can.
    why_no_eager_steps: str | None = None

    @property
    def num_readers(self) -> int:
        """The number of tasks that read an input of `evaluate` or `predict`."""

    @property
    def own_devices(self) -> tuple[str, ...]:
        """The short name of the device that computes in this process, in a tuple."""

    def begin_fit(
        self, data: object, callbacks: object, **arguments: Unpack[InputArguments]
    ) -> tuple[Input, Any]:
        """Return the input of a new `fit`, and the callbacks to call in this process."""

    def before_steps(
        self, model: keras.Model, mode: Mode, function: TracedStep, data: Input | Sequence[object]
    ) -> None:
        """Note that steps are about to run. Call before any callback."""
        return

    def dispatcher(self, steps: LoopSteps) -> Dispatching:
        """Return the object that runs the executions of a loop."""


class HostOfWorkers(Host, Protocol):
    """The host in a process that coordinates workers, for the code that sends to workers."""

    membership: Membership  # knows which tasks answer

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
