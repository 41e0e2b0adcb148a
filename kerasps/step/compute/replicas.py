"""The replicas of a step: `train_step` traced once for each device of a worker, in one graph.

Each replica has a batch, metrics and seeds; all share the pulled values. A thread traces each, one
at a time: a replica runs until it applies an optimizer, where it waits for the others. The first
replica then applies it, once, to the sums of all gradients, and all replicas see the changes. Keras
divides the loss of a replica by their number, so the sum of the gradients is the gradient of the
mean.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import tensorflow as tf

from kerasps import _compat
from kerasps.errors import UnsupportedError
from kerasps.step.compute.compute import Compute
from kerasps.step.compute.returned import Returned
from kerasps.step.contract.change import Change
from kerasps.step.contract.compute_messages import ComputeInputs, ComputeOutputs
from kerasps.step.contract.inventory import Inventory
from kerasps.step.records.identity import IdentitySet
from kerasps.variables import ParameterServerVariable, entering
from kerasps.variables.keras.joins import Join
from kerasps.variables.lanes.phase import as_replica

_Result = TypeVar("_Result")


class _Abandoned(BaseException):
    """Ends the thread of a replica after another one has failed."""


class Lockstep(Generic[_Result]):
    """Runs a function for each replica, which may wait for the others in `meet`.

    One replica runs at a time, in the order of their numbers: after a meeting, the second goes on
    only when the first has reached the next meeting or its end.
    """

    def __init__(self, bodies: Sequence[Callable[[], _Result]]) -> None:
        self._threads = [_ReplicaThread(body, i) for i, body in enumerate(bodies)]
        self._current: _ReplicaThread[_Result] | None = None
        self._met: list[Any] = []
        self._turns: list[tuple[int, int]] = []

    def replica_of(self, place: int) -> int:
        """Return the replica that added the operation at a place of the graph; 0 if none did."""
        return next((replica for end, replica in self._turns if place < end), 0)

    def run(self) -> list[_Result]:
        """Return the result of each replica.

        Raises the error of the first one to fail; UnsupportedError if they do not meet equally
        often.
        """
        graph = tf.compat.v1.get_default_graph()
        for thread in self._threads:
            thread.start()
        try:
            while True:
                for replica, thread in enumerate(self._threads):
                    self._current = thread
                    thread.go_on()
                    self._turns.append((len(graph.get_operations()), replica))
                done = {thread.is_done for thread in self._threads}
                if done == {True}:
                    return [thread.result for thread in self._threads]
                if len(done) > 1:
                    raise UnsupportedError(
                        "The replicas of a worker did not apply their optimizers equally often. "
                        "Expected: a `train_step` that does the same in each replica. Received: "
                        f"one that differs among {len(self._threads)}. Make it independent of "
                        "`replica_id_in_sync_group`, or give one device as `worker_devices`."
                    )
                self._met = [thread.met for thread in self._threads]
        finally:
            for thread in self._threads:
                thread.abandon()

    def meet(self, value: object) -> list[Any]:
        """Wait until all replicas call this; return their values. Call in a replica."""
        assert self._current is not None
        self._current.wait_for_others(value)
        return self._met


class _ReplicaThread(threading.Thread, Generic[_Result]):
    """The thread of one replica, in the graph and the Keras scopes of the thread that makes it."""

    def __init__(self, body: Callable[[], _Result], index: int) -> None:
        super().__init__(name=f"kerasps-replica-{index}", daemon=True)
        self._body = body
        self._graph: Any = tf.compat.v1.get_default_graph()
        # Makes device scopes and other state of the graph local to each thread, from here on.
        self._graph.switch_to_thread_local()
        self._keras = {
            name: list(value) if isinstance(value, list) else value
            for name, value in vars(_compat.global_state).items()
        }
        self._may_run, self._has_paused = threading.Event(), threading.Event()
        self._is_abandoned = False
        self._error: BaseException | None = None
        self.is_done = False
        self.met: Any = None
        self.result: Any = None

    def run(self) -> None:
        try:
            self._wait()
            vars(_compat.global_state).update(self._keras)
            with self._graph.as_default():
                self.result = self._body()
        except BaseException as exc:
            self._error = exc
        finally:
            self.is_done = True
            self._has_paused.set()

    def go_on(self) -> None:
        """Run the thread until it waits for others or is done. Raises its error."""
        if self.is_done:
            return
        self._may_run.set()
        self._has_paused.wait()
        self._has_paused.clear()
        if self._error is not None:
            raise self._error

    def wait_for_others(self, value: object) -> None:
        """Pass a value to the others, and wait for theirs. Thread: this one."""
        self.met = value
        self._has_paused.set()
        self._wait()

    def abandon(self) -> None:
        """End the thread, and wait until it has ended."""
        self._is_abandoned = True
        self._may_run.set()
        self.join()

    def _wait(self) -> None:
        self._may_run.wait()
        self._may_run.clear()
        if self._is_abandoned:
            raise _Abandoned


class Replicas:
    """The replicas of a step, in the graph that is being traced."""

    def __init__(
        self,
        strategy: tf.distribute.ParameterServerStrategy,
        inventory: Inventory,
        inputs: Sequence[ComputeInputs],
        *,
        trains_bare: bool,
        has_gpu: bool,
    ) -> None:
        self._strategy = strategy
        self._batches = [replica.batch for replica in inputs]
        self._lockstep: Lockstep[Returned]
        self._is_applying = False
        # The changes of the optimizer that was applied last, and the variables changed by any.
        self._last_changes: list[tuple[ParameterServerVariable, tf.Tensor]] = []
        self._changed: IdentitySet[ParameterServerVariable] = IdentitySet()
        # The phase of each replica.
        self.phases = [
            Compute(
                inventory,
                replica,
                trains_bare=trains_bare,
                has_gpu=has_gpu,
                apply_together=self._apply,
            )
            for replica in inputs
        ]
        for phase in self.phases[1:]:
            phase.share_updates(self.phases[0])

    def call(self, call: Callable[[Any], Returned], devices: Sequence[str]) -> list[Returned]:
        """Call a method for each replica, on its device; return the results."""

        def body(replica: int) -> Returned:
            with (
                tf.device(devices[replica]),
                self._strategy.scope(),
                as_replica(len(devices)),
                _ReplicaOfSeveral(self._strategy, replica),
                entering(self.phases[replica]),
            ):
                return call(self._batches[replica])

        self._lockstep = Lockstep(
            [functools.partial(body, replica) for replica in range(len(devices))]
        )
        return self._lockstep.run()

    def replica_of(self, place: int) -> int:
        """Return the replica of the operation at a place of the graph. Call after `call`."""
        return self._lockstep.replica_of(place)

    def _apply(
        self,
        phase: Compute,
        apply: Callable[[Sequence[tf.Tensor | tf.IndexedSlices | None]], None],
        gradients: Sequence[tf.Tensor | tf.IndexedSlices | None],
    ) -> None:
        """Apply an optimizer to the sums of all replicas' gradients. Thread: that of a replica."""
        if self._is_applying:  # inside another optimizer, such as one that scales losses
            apply(gradients)
            return
        if phase.values.in_control_flow():
            raise UnsupportedError(
                "An optimizer was applied inside a `tf.cond` or a loop of `train_step`, and the "
                "worker has several devices, whose gradients are summed there. Expected: "
                "`optimizer.apply` outside of control flow. Received: it inside. Apply it outside, "
                "with gradients of zeros for no change, or give one device as `worker_devices`."
            )
        given = self._lockstep.meet([_dense(gradient) for gradient in gradients])
        if phase is self.phases[0]:
            phase.values.changed.clear()
            self._is_applying = True
            apply([_sum(of_variable) for of_variable in zip(*given, strict=True)])
            self._is_applying = False
            self._last_changes = [
                (variable, phase.read_whole(variable)) for variable in phase.values.changed
            ]
            self._changed |= phase.values.changed
            return
        phase.values.num_updates = self.phases[0].values.num_updates
        for variable, value in self._last_changes:
            phase.values.set_ahead(variable, value)

    def outputs(self) -> ComputeOutputs:
        """Return the outputs of the step, except logs and predictions. Call once, after `call`.

        In all but the first replica, states of metrics start anew, so that they can be joined.
        """
        first = self.phases[0]
        of_replicas = [phase.outputs() for phase in self.phases]
        metrics = [outputs.metrics for outputs in of_replicas]
        joined = self._joined([outputs.changes for outputs in of_replicas])
        first.changes = [
            change if change.variable in self._changed else change.of_replicas(len(self.phases))
            for change in first.changes
        ]
        return of_replicas[0]._replace(
            metrics=[
                functools.reduce((join or Join.SUM).tensors, states)
                for join, *states in zip(first.joins, *metrics, strict=True)
            ],
            changes=joined,
        )

    def _joined(self, of_replicas: list[list[Change]]) -> list[Change]:
        """Return the changes of all replicas, in the order of those of the first."""
        others = [
            iter(
                tensors
                for change, tensors in zip(phase.changes, changes, strict=True)
                if change.variable not in self._changed
            )
            for phase, changes in zip(self.phases[1:], of_replicas[1:], strict=True)
        ]
        return [
            tensors
            if change.variable in self._changed
            else change.joined([tensors, *map(next, others)])
            for change, tensors in zip(self.phases[0].changes, of_replicas[0], strict=True)
        ]


def mean_logs(returned: Sequence[Returned]) -> list[tf.Tensor]:
    """Return the means of the logs, except metrics, that replicas returned."""
    return [
        tf.add_n(of_replicas) / len(returned)
        for of_replicas in zip(*(replica.logs for replica in returned), strict=True)
    ]


class OnlyReplica(tf.distribute.ReplicaContext):
    """The replica context of a step on one device: a sum or mean over replicas is the value."""

    def all_reduce(self, reduce_op: object, value: object, options: object = None) -> Any:
        """Return the value, as TensorFlow does for one replica."""
        del reduce_op, options
        return tf.nest.map_structure(tf.identity, value)


class _ReplicaOfSeveral(tf.distribute.ReplicaContext):
    """The replica context of one of several replicas, which meet only in their optimizers."""

    def merge_call(self, *args: object, **kwargs: object) -> Any:
        """Raise UnsupportedError."""
        raise _no_other_meeting("`merge_call`")

    def all_reduce(self, *args: object, **kwargs: object) -> Any:
        """Raise UnsupportedError."""
        raise _no_other_meeting("`all_reduce`")


def _no_other_meeting(received: str) -> UnsupportedError:
    return UnsupportedError(
        "The replicas of a worker exchange values in the step, as `BatchNormalization` does with "
        "`synchronized=True`. Expected: replicas that exchange only an optimizer's gradients. "
        f"Received: {received} with several devices per worker. Leave `synchronized` out, or give "
        "one device as `worker_devices`."
    )


def _dense(gradient: tf.Tensor | tf.IndexedSlices | None) -> Any:
    return tf.convert_to_tensor(gradient) if isinstance(gradient, tf.IndexedSlices) else gradient


def _sum(gradients: Sequence[tf.Tensor | tf.IndexedSlices | None]) -> Any:
    """Return the sum of the gradients of a variable; None if no replica has one."""
    given = [gradient for gradient in gradients if gradient is not None]
    return tf.add_n(given) if given else None
