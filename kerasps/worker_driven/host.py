"""The host of a strategy whose workers drive their own steps, each in its process."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Unpack

import keras
import tensorflow as tf

from kerasps.base_host import BaseHost
from kerasps.cluster.connection.connect import connect_to_tasks
from kerasps.cluster.description.cluster_description import ClusterDescription
from kerasps.cluster.description.protocol import ClusterResolver
from kerasps.cluster.description.worker_devices import compute_devices, devices_of_task
from kerasps.cluster.members.membership import WorkerInfo
from kerasps.errors import UnsupportedError
from kerasps.inputs import DatasetCreator, Input, InputArguments, as_input
from kerasps.runtime.devices import COORDINATOR_TASK
from kerasps.step import TRAIN
from kerasps.strategy_arguments import Partitioner, StrategyOptions
from kerasps.tools.tracing import Trace
from kerasps.training import Dispatching
from kerasps.training.contract.host import LoopSteps
from kerasps.worker_driven.fit_messages import FitMessages, StopBroadcast
from kerasps.worker_driven.in_process_dispatcher import InProcessDispatcher
from kerasps.worker_driven.run import Run
from kerasps.worker_driven.shared_variables import SharedExtended
from kerasps.worker_driven.step_budget import StepBudget

_LOGGER = logging.getLogger("kerasps")

# Callbacks that write files, or change state that all workers share: only the chief calls them.
_OF_CHIEF = (
    keras.callbacks.CSVLogger,
    keras.callbacks.EarlyStopping,
    keras.callbacks.LearningRateScheduler,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.ReduceLROnPlateau,
    keras.callbacks.SwapEMAWeights,
    keras.callbacks.TensorBoard,
    Trace,
)


@dataclass(frozen=True, kw_only=True)
class WorkerDrivenOptions(StrategyOptions):
    """The arguments of the constructor beside the cluster and the time to connect to it.

    None stands for the environment variable.
    """

    run_id: str | None
    chief_timeout: float | None


class WorkerHost(BaseHost):
    """The host of a strategy whose workers drive their own steps (see `training.Host`)."""

    after_ps_loss = (
        "Start the ps and the workers again, from the last checkpoint: "
        "`kerasps.train_and_evaluate` resumes from it."
    )
    why_no_eager_steps = (
        "Steps that run eagerly read and write variables one by one, and workers would undo "
        "what others have done. Expected: a model compiled without `run_eagerly=True`. "
        "Received: `run_eagerly=True`. Debug with one plain process, or with "
        "`kerasps.ParameterServerStrategy`."
    )
    num_readers = 1
    # The total number of steps of all workers; None without a limit.
    _max_steps: int | None = None

    def __init__(self, cluster: ClusterDescription, options: WorkerDrivenOptions) -> None:
        tasks = {"chief": (str(cluster.address),), "ps": cluster.jobs["ps"]}
        super().__init__(cluster, ClusterDescription(tasks, "chief", 0), options)
        self._run_id, self._chief_timeout = options.run_id, options.chief_timeout

    def connect(self, protocol: str | None) -> None:
        """Connect this process to the ps. All its devices stay visible, since it computes."""
        task = self.description.task
        connect_to_tasks(self.connects_to, protocol=protocol, own_task=task)

    def make_extended(
        self,
        strategy: tf.distribute.ParameterServerStrategy,
        cluster_resolver: ClusterResolver,
        variable_partitioner: Partitioner | None,
    ) -> SharedExtended:
        """Return the object that places the strategy's variables, the same way in each worker."""
        self.strategy = strategy
        self._run = Run(
            self._run_id,
            is_chief=self.is_chief,
            chief=_chief_text(self.description),
            timeout=self._chief_timeout,
        )
        self.extended = extended = SharedExtended(
            strategy, cluster_resolver, variable_partitioner, self.options.shard_layout, self._run
        )
        return extended

    def begin(self) -> None:
        """Begin the run, or join it."""
        super().begin()
        self._began = time.monotonic()
        self._run.open(self.extended.mutex)

    def leave_cluster(self) -> None:
        """End the run if this process is its chief and did not fail."""
        self.extended.key_pools.stop()
        # A chief that failed is started again, and continues the run. Python keeps the error that
        # ended the process in `sys.last_value`.
        if self.is_chief and not hasattr(sys, "last_value"):
            self._run.finish()

    def close(self, disconnect: Callable[[], None]) -> None:
        """Leave the run and disconnect, when the cluster is closed."""
        self.leave_cluster()
        disconnect()

    def hangs(self, ps: int) -> bool:
        """Return False, since nothing watches the ps; a call to one that hangs ends in an error."""
        del ps
        return False

    def worker_infos(self) -> list[WorkerInfo]:
        """Return this process, the only worker that it knows."""
        address = str(self.description.address)
        return [WorkerInfo(self.worker_index, address, "connected", time.monotonic() - self._began)]

    def ps_infos(self) -> list[WorkerInfo]:
        """Return the ps of the description, without asking them."""
        since_s = time.monotonic() - self._began
        addresses = self.description.jobs["ps"]
        return [WorkerInfo(i, address, "connected", since_s) for i, address in enumerate(addresses)]

    @property
    def own_worker(self) -> int:
        """The index of this process among those that do steps."""
        return self.worker_index

    @property
    def is_chief(self) -> bool:
        """True if this process is the chief, which writes files and sees merged metrics."""
        return _is_chief(self.description)

    @property
    def num_workers(self) -> int:
        """The number of processes that do steps: the workers, and a chief if there is one."""
        return len(self.description.jobs["worker"]) + len(self.description.jobs.get("chief", ()))

    @property
    def worker_index(self) -> int:
        """The index of this process among those that do steps, from 0; a chief comes first."""
        if self.description.task_type == "chief":
            return 0
        return self.description.task_index + len(self.description.jobs.get("chief", ()))

    @property
    def begins_run(self) -> bool:
        """True if this process gives the variables their initial values."""
        return self._run.is_new

    @contextlib.contextmanager
    def limited_to(self, max_steps: int | None) -> Iterator[None]:
        """Stop `fit` within this context when all workers together have done `max_steps` steps."""
        self._max_steps = max_steps
        try:
            yield
        finally:
            self._max_steps = None

    def devices_of(self, worker: int) -> tuple[str, ...]:
        """Return the short name of the device that computes in this process, in a tuple.

        Raises ValueError for another worker, since this process knows only its own devices.
        """
        if worker != self.worker_index:
            raise ValueError(
                "A worker that drives its own steps knows only its own devices. Expected: "
                f"worker={self.worker_index}, this process. Received: worker={worker!r}. Call it "
                "in the other worker."
            )
        return compute_devices(devices_of_task(COORDINATOR_TASK), None)[:1]

    def devices_of_workers(self) -> list[tuple[str, ...]]:
        """Return the devices of this process only, since it traces steps for no others."""
        return [self.own_devices]

    @property
    def own_devices(self) -> tuple[str, ...]:
        """The short name of the device that computes in this process, in a tuple."""
        return self.devices_of(self.worker_index)

    def begin_fit(
        self, data: object, callbacks: object, **arguments: Unpack[InputArguments]
    ) -> tuple[Input, Any]:
        """Return this worker's share of an input, and the callbacks to call in this process."""
        return self._input_of_fit(data, **arguments), self._callbacks_of_fit(callbacks)

    def _input_of_fit(self, data: object, **arguments: Unpack[InputArguments]) -> Input:
        number, self._run.num_fits = self._run.num_fits, self._run.num_fits + 1
        workers, index = self.num_workers, self.worker_index
        if isinstance(data, DatasetCreator):
            return as_input(_share_of(data, workers, index), 1, **arguments)
        inputs = as_input(data, workers, **arguments)
        if inputs.num_splits > 1:
            # All workers use the order that the chief has drawn, and each reads its own batches.
            inputs.start_pass(0, must_end=False)
            position = self._run.agreed(
                f"fit {number}/order", lambda: inputs.position(in_epoch=True)
            )
            inputs.resume_order(position, passes_to_repeat=1)
            if inputs.num_batches is not None:
                inputs.num_batches = len(range(index, inputs.num_batches, workers))
        return inputs

    def _callbacks_of_fit(self, callbacks: object) -> Any:
        given = _listed(callbacks)
        for callback in given:
            if isinstance(callback, keras.callbacks.BackupAndRestore):
                raise UnsupportedError(
                    "A worker that drives its own steps has nothing to back up: the variables are "
                    "on the ps, and a worker that comes back uses them. Expected: "
                    "`keras.callbacks.ModelCheckpoint`, against the loss of a ps. Received: "
                    "`BackupAndRestore`. Remove it from `callbacks`."
                )
        if self.is_chief:
            chosen = [*given, StopBroadcast(self._run, self._run.num_fits - 1)]
        else:
            chosen = [callback for callback in given if not isinstance(callback, _OF_CHIEF)]
            left_out = [type(c).__name__ for c in given if isinstance(c, _OF_CHIEF)]
            if left_out:
                _LOGGER.info("Left to the chief: %s.", ", ".join(left_out))
        if isinstance(callbacks, keras.callbacks.CallbackList):
            callbacks.callbacks = chosen
            return callbacks
        return chosen

    def dispatcher(self, steps: LoopSteps) -> Dispatching:
        """Return the object that runs the executions of a loop in this process."""
        messages = budget = None
        if steps.mode is TRAIN and self.num_workers > 1:
            messages = FitMessages(self._run, steps.model, steps.function, self._run.num_fits - 1)
        if steps.mode is TRAIN and self._max_steps is not None:
            budget = StepBudget(self._run, steps.model, self._max_steps)
        return InProcessDispatcher(
            steps.function,
            steps.inputs,
            worker=self.worker_index,
            split=self.worker_index if steps.inputs.num_splits > 1 else 0,
            devices=self.own_devices,
            seed_offset=self._run.seed_offset,
            messages=messages,
            budget=budget,
        )


def _is_chief(cluster: ClusterDescription) -> bool:
    if "chief" in cluster.jobs:
        return cluster.task_type == "chief"
    return cluster.task_index == 0


def _chief_text(cluster: ClusterDescription) -> str:
    job = "chief" if "chief" in cluster.jobs else "worker"
    return f"{job} 0 at {cluster.jobs[job][0]}"


def _share_of(creator: DatasetCreator, num_workers: int, worker: int) -> DatasetCreator:
    """Return a creator of the dataset of `worker`, whatever context it is called with."""
    context = tf.distribute.InputContext(num_workers, worker, num_replicas_in_sync=1)
    return DatasetCreator(lambda _: creator(context), creator.input_options)


def _listed(callbacks: object) -> list[Any]:
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return list(callbacks.callbacks)
    return list(keras.tree.flatten(callbacks)) if callbacks is not None else []
