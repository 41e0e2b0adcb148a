"""The plans of a step, by the devices that compute it: a worker has one GPU, several or none.

Keras asks for the devices during a trace: it takes cuDNN's kernels for a recurrent layer where it
sees a GPU, and several devices are several replicas. So each kind of worker needs a trace.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterable, Sequence

from kerasps.errors import UnsupportedError
from kerasps.step.tracing.plan import StepPlan
from kerasps.step.tracing.tracer import Tracer

_LOGGER = logging.getLogger("kerasps")

# The interval at which a waiting worker's thread checks that its flight is still running.
_POLL_S = 0.1


class DevicePlans:
    """Traces a step for each kind of worker."""

    def __init__(self, tracer: Tracer, device: str) -> None:
        self._tracer = tracer
        self.trace = tracer.trace(device)  # the first trace
        self._plans: dict[tuple[str, ...], StepPlan] = {(device,): self.trace.plan}
        self._awaited: set[tuple[str, ...]] = set()
        self._has_changed = threading.Condition()

    def trace_for(self, devices_of_workers: Iterable[Sequence[str]]) -> None:
        """Trace the step for the devices of each worker that have no trace yet.

        Call before the first execution is sent. Thread: `fit`'s.

        Raises UnsupportedError if the step cannot run on them.
        """
        for devices in dict.fromkeys(tuple(devices) for devices in devices_of_workers):
            single = self._traced(devices[:1])
            if len(devices) > 1:
                self._traced(devices, single)

    def _traced(self, devices: tuple[str, ...], single: StepPlan | None = None) -> StepPlan:
        if devices not in self._plans:
            self._plans[devices] = self._tracer.trace_for(devices, self.trace.plan, single)
        return self._plans[devices]

    def num_replicas(self, devices: Sequence[str]) -> int:
        """Return the number of batches that a step takes on a worker with these devices.

        A worker that joins after `trace_for` and has another set of devices uses only the first.
        """
        return len(devices) if tuple(devices) in self._plans else 1

    @property
    def batches_per_step(self) -> int:
        """The smallest number of batches that makes whole steps on every worker."""
        return math.lcm(*(plan.num_replicas for plan in self._plans.values()))

    def plan_for(self, size: int, replicas: int, devices: tuple[str, ...]) -> StepPlan:
        """Return the plan of an execution on a worker."""
        if size < replicas or replicas == 1:
            return self._plans[devices[:1]]
        if len(devices) == replicas and devices in self._plans:
            return self._plans[devices]
        # Executions that a lost worker began are redone in the same steps; TensorFlow replaces
        # devices that the new worker does not have.
        return next(plan for plan in self._plans.values() if plan.num_replicas == replicas)

    # Workers that join while steps run, with other devices

    def await_trace(self, devices: Sequence[str], is_over: Callable[[], bool]) -> None:
        """Wait until the step is traced for the first of `devices`. Thread: a worker's."""
        first = tuple(devices[:1])
        with self._has_changed:
            while first not in self._plans and not is_over():
                self._awaited.add(first)
                self._has_changed.wait(_POLL_S)

    def trace_awaited(self) -> None:
        """Trace the step for the devices that workers wait for. Thread: `fit`'s (all traces)."""
        if not self._awaited:
            return
        with self._has_changed:
            awaited = {devices for devices in self._awaited if devices not in self._plans}
            self._awaited.clear()
        for devices in awaited:
            try:
                self._traced(devices)
            except UnsupportedError as exc:
                # A worker with unsupported devices must not end the training.
                _LOGGER.warning(
                    f"The step cannot be traced for {devices[0]}, so the trace for other devices "
                    f"runs there: {exc}"
                )
                self._plans[devices] = self.trace.plan
        with self._has_changed:
            self._has_changed.notify_all()
