"""`WorkerDrivenStrategy`: each worker's process trains by itself, on variables that all share."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import keras
import tensorflow as tf

from kerasps import _compat
from kerasps.cluster.connection.connect import connect_to_tasks as connect
from kerasps.cluster.description.cluster_description import (
    EVALUATOR,
    ClusterDescription,
    read_tf_config,
)
from kerasps.cluster.description.protocol import ClusterResolver
from kerasps.cluster.description.worker_devices import compute_devices, devices_of_task
from kerasps.cluster.local.cluster_resolver import as_resolver, describe_resolver
from kerasps.cluster.local.local_cluster import LocalCluster
from kerasps.cluster.local.resolver import LocalClusterResolver
from kerasps.cluster.members.membership import WorkerInfo
from kerasps.errors import ClusterConfigError, UnsupportedError
from kerasps.inputs import DatasetCreator, Input, as_input
from kerasps.runtime.devices import COORDINATOR_TASK
from kerasps.step import TRAIN, Mode, TracedStep
from kerasps.step.contract.inventory import DEFAULT_TABLE_MIN_BYTES
from kerasps.strategy import ParameterServerStrategy
from kerasps.strategy_arguments import ShardLayout, SparseUpdates
from kerasps.training import Dispatching
from kerasps.worker_driven.fit_news import FitNews, TellStop
from kerasps.worker_driven.own_steps import OwnSteps
from kerasps.worker_driven.run import Run, check_run
from kerasps.worker_driven.shared_variables import SharedExtended
from kerasps.worker_driven.step_budget import StepBudget

_LOGGER = logging.getLogger("kerasps")

# Callbacks that write files, or change what all workers share: one of each is enough.
_OF_CHIEF = (
    keras.callbacks.CSVLogger,
    keras.callbacks.EarlyStopping,
    keras.callbacks.LearningRateScheduler,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.ReduceLROnPlateau,
    keras.callbacks.SwapEMAWeights,
    keras.callbacks.TensorBoard,
)


class WorkerDrivenStrategy(ParameterServerStrategy):
    """Train Keras 3 models with workers that each run the same program, by themselves.

    Each worker makes this strategy, builds the model under `scope()`, and calls `model.fit` on its
    share of the data. Variables are on the ps tasks, which run `kerasps serve`. Updates of workers
    are independent of each other, and none is lost: `model.optimizer.iterations` counts the steps
    of all. There is no coordinator. A worker may die, join late or come back, and the others go on;
    of the step in which it is killed, each ps has applied all of its part or nothing.

    One worker is the chief: the task `chief` of the cluster or, without one, worker 0. It computes
    as the others do. It also gives the variables their initial values, which the others wait for.
    It alone assigns to variables outside of steps, and its callbacks alone write files, schedule
    the learning rate or stop the training. Their logs at the end of an epoch are those of all
    workers; the callbacks of others see their own.

    ```python
    # The same script in each worker. TF_CONFIG lists `worker` and `ps` tasks, and says which this
    # is.
    strategy = kerasps.WorkerDrivenStrategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(1)])
        model.compile("adam", "mse")
    model.fit(kerasps.DatasetCreator(dataset_fn), epochs=3, steps_per_epoch=100)
    ```

    Args:
        cluster_resolver: a `tf.distribute.cluster_resolver.ClusterResolver` whose cluster has at
            least one `worker` and one `ps`, and may have a `chief`. Default: the one that
            `TF_CONFIG` describes.
        variable_partitioner: as for `ParameterServerStrategy`.
        shard_layout: as for `ParameterServerStrategy`.
        sparse_updates: as for `ParameterServerStrategy`.
        table_min_bytes: as for `ParameterServerStrategy`.
        run_id: a name that the workers of a run have in common. The ps may serve runs of other
            names at the same time. Default: the environment variable `KERASPS_RUN_ID`, else
            `"run"`.
        chief_timeout: seconds to wait for the chief to give a variable its initial value. Default:
            the environment variable `KERASPS_CHIEF_TIMEOUT`, else 600.
        connect_timeout: seconds to wait for every ps to be reachable. Default: the environment
            variable `KERASPS_CONNECT_TIMEOUT`, else 60.

    Raises:
        ClusterConfigError: the cluster's description is wrong, or this process is a ps or an
            evaluator in it.
        TaskUnreachableError: ps, named, did not answer within `connect_timeout`, or the chief did
            not begin the run within `chief_timeout`.
        TaskStartError: this worker's port is in use.
        KeraspsError: this process is connected to another cluster already.
        TypeError: `variable_partitioner` cannot be called, or `table_min_bytes` is not an integer.
        ValueError: an argument is not one of its values, or differs from that of the strategy which
            this process has already.
        UnsupportedError: the backend of Keras is not TensorFlow.
        ImportError: a private name of Keras or TensorFlow is gone in the versions installed.

    Follows `tf.compat.v1.distribute.experimental.ParameterServerStrategy`.
    """

    # The steps that all workers do together; None without a limit.
    _max_steps: int | None = None

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        variable_partitioner: Callable[..., Any] | None = None,
        *,
        shard_layout: ShardLayout = "mod",
        sparse_updates: SparseUpdates = "lazy",
        table_min_bytes: int = DEFAULT_TABLE_MIN_BYTES,
        run_id: str | None = None,
        chief_timeout: float | None = None,
        connect_timeout: float | None = None,
    ) -> None:
        _compat.check_backend()
        if cluster_resolver is None:
            cluster = read_tf_config(needs_chief=False)
        elif isinstance(cluster_resolver, (LocalCluster, LocalClusterResolver)):
            raise ClusterConfigError(
                "The workers of a LocalCluster are servers, and drive no steps. Expected: "
                "processes that each run this script. Received: a LocalCluster, or "
                "its cluster resolver. Start the script with `kerasps launch --mode worker`."
            )
        else:
            cluster = describe_resolver(as_resolver(cluster_resolver), needs_chief=False)
        if cluster.task_type not in ("chief", "worker"):
            raise _drives_no_steps(cluster)
        check_run(run_id, chief_timeout)
        own = ClusterDescription(
            {"chief": (str(cluster.address),), "ps": cluster.jobs["ps"]}, "chief", 0
        )
        arguments: dict[str, Any] = {
            "variable_partitioner": variable_partitioner,
            "shard_layout": shard_layout,
            "sparse_updates": sparse_updates,
            "table_min_bytes": table_min_bytes,
            "run_id": run_id,
            "chief_timeout": chief_timeout,
            # Workers are far apart, and each by itself.
            "max_staleness": None,
            "overlap": False,
            # Each worker computes on its first GPU, else on its CPU.
            "worker_devices": None,
            "update_mode": "async",
            "num_backup_workers": 0,
        }
        if not hasattr(self, "_cluster"):  # else it is in use already, maybe for another cluster
            self._cluster: ClusterDescription = cluster
        self._set_up(_resolver(cluster), own, arguments, connect_timeout)

    @property
    def description(self) -> ClusterDescription:
        """The cluster: the addresses of its tasks, by job, and which of them this process is."""
        return self._cluster

    @property
    def after_ps_loss(self) -> str:
        """What to do when a ps is lost, for the error that says so."""
        return (
            "Start the ps and the workers again, from the last checkpoint: "
            "`kerasps.train_and_evaluate` goes on there by itself."
        )

    @property
    def is_chief(self) -> bool:
        """Whether this process is the chief, which writes files and sees merged metrics."""
        return _is_chief(self._cluster)

    @property
    def num_workers(self) -> int:
        """The number of processes that do steps: the worker tasks, and a chief."""
        return len(self._cluster.jobs["worker"]) + len(self._cluster.jobs.get("chief", ()))

    @property
    def worker_index(self) -> int:
        """The place of this process among those that do steps, from 0; a chief comes first."""
        if self._cluster.task_type == "chief":
            return 0
        return self._cluster.task_index + len(self._cluster.jobs.get("chief", ()))

    @property
    def coordinator(self) -> NoReturn:
        """Refuse: there is none, since each worker drives its own steps.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(
            "A WorkerDrivenStrategy has no ClusterCoordinator. Expected: `model.fit` in each "
            "worker. Received: a use of `strategy.coordinator`. Use "
            "`kerasps.ParameterServerStrategy` to schedule functions on workers."
        )

    def workers(self) -> list[WorkerInfo]:
        """Refuse: nobody watches the workers, since nobody depends on them.

        Returns:
            Nothing.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(
            "A WorkerDrivenStrategy does not know which workers are there: none depends on "
            "another. Expected: a use of `strategy.description`, which lists them. Received: "
            "`strategy.workers()`. Ask whoever starts the workers."
        )

    def staleness(self) -> NoReturn:
        """Refuse: who is to know how stale whose updates are is a coordinator.

        Returns:
            Nothing.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(
            "A WorkerDrivenStrategy does not tell whose updates are how stale: the ps know no "
            "workers. Expected: `model.fit` without it. Received: `strategy.staleness()`. Train "
            "with `kerasps.ParameterServerStrategy` to see it."
        )

    def run(self, fn: Any, args: Any = (), kwargs: Any = None, options: Any = None) -> NoReturn:
        """Refuse: functions of your own are not run as steps in this mode.

        Args:
            fn: the function.
            args: its arguments.
            kwargs: its keyword arguments.
            options: a `tf.distribute.RunOptions`.

        Returns:
            Nothing.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(
            "A WorkerDrivenStrategy runs steps of models only. Expected: `model.fit`, or "
            "`model.train_on_batch` for a loop of your own. Received: `strategy.run` of "
            f"{getattr(fn, '__name__', fn)!r}. Override `train_step` for what a step is to do."
        )

    def __repr__(self) -> str:
        return (
            f"<WorkerDrivenStrategy {self._cluster.task_type} {self._cluster.task_index} "
            f"num_workers={self.num_workers} num_ps={self.num_ps}>"
        )

    # What is done differently from the strategy with a coordinator.

    def _connect_to_cluster(self, coordinator_name: str) -> None:
        self._num_workers = self.num_workers
        self._num_ps = len(self._cluster.jobs["ps"])
        connect(
            self._description,
            protocol=self._cluster_resolver.rpc_layer,
            own_task=(self._cluster.task_type, self._cluster.task_index),
        )

    def _settle_calls(self) -> None:
        """Do nothing: nobody schedules functions here."""

    def _choose_devices(self) -> None:
        """Leave all devices visible: this process computes."""

    def devices_of(self, worker: int) -> tuple[str, ...]:
        """Return the name of the device that computes on a worker: its first GPU, else its CPU.

        Args:
            worker: the place of the worker among those that do steps: `worker_index`.

        Returns:
            One name, such as `"GPU:0"`.

        Raises:
            ValueError: it is another worker than this process, which knows its own devices alone.
        """
        if worker != self.worker_index:
            raise ValueError(
                "A worker that drives its own steps knows its own devices alone. Expected: "
                f"worker={self.worker_index}, this process. Received: worker={worker!r}. Ask for "
                "them in that worker."
            )
        return compute_devices(devices_of_task(COORDINATOR_TASK), None)[:1]

    def _devices_of_workers(self) -> list[tuple[str, ...]]:
        return [self._own_devices]

    @property
    def _own_devices(self) -> tuple[str, ...]:
        return self.devices_of(self.worker_index)

    def _make_extended(self, cluster_resolver: Any, variable_partitioner: Any) -> SharedExtended:
        self._run = Run(
            self._arguments["run_id"],
            is_chief=self.is_chief,
            chief=_chief_text(self._cluster),
            timeout=self._arguments["chief_timeout"],
        )
        return SharedExtended(
            self,
            cluster_resolver,
            variable_partitioner,
            self._arguments["shard_layout"],
            self._run,
        )

    def _watch(self, cluster_resolver: Any) -> None:
        self._run.open(self._extended.mutex)

    def _leave(self, *, is_closed: bool) -> None:
        # A chief that failed is started again, and goes on with the run. Python leaves the error
        # here that it has ended in.
        if self.is_chief and not hasattr(sys, "last_value"):
            self._run.finish()

    def _end_calls(self) -> None:
        """Do nothing: no other task does anything for this process."""

    @property
    def _num_readers(self) -> int:
        return 1

    def _training_input(self, data: Any, **arguments: Any) -> Input:
        number, self._run.num_fits = self._run.num_fits, self._run.num_fits + 1
        workers, own = self.num_workers, self.worker_index
        if isinstance(data, DatasetCreator):
            return as_input(_share_of(data, workers, own), 1, **arguments)
        inputs = as_input(data, workers, **arguments)
        if inputs.num_splits > 1:
            # All workers read it in the order that the chief has drawn, each its own batches.
            inputs.start_pass(0, must_end=False)
            position = self._run.agreed(
                f"fit {number}/order", lambda: inputs.position(in_epoch=True)
            )
            inputs.resume_order(position, passes_to_repeat=1)
            if inputs.num_batches is not None:
                inputs.num_batches = len(range(own, inputs.num_batches, workers))
        return inputs

    def _training_callbacks(self, callbacks: Any) -> Any:
        given = _listed(callbacks)
        for callback in given:
            if isinstance(callback, keras.callbacks.BackupAndRestore):
                raise UnsupportedError(
                    "A worker that drives its own steps has nothing to back up: the variables are "
                    "on the ps, and a worker that comes back goes on with them. Expected: "
                    "`keras.callbacks.ModelCheckpoint`, against the loss of a ps. Received: "
                    "`BackupAndRestore`. Take it out of `callbacks`."
                )
        if self.is_chief:
            own = [*given, TellStop(self._run, self._run.num_fits - 1)]
        else:
            own = [callback for callback in given if not isinstance(callback, _OF_CHIEF)]
            left_out = [type(c).__name__ for c in given if isinstance(c, _OF_CHIEF)]
            if left_out:
                _LOGGER.info("Left to the chief: %s.", ", ".join(left_out))
        if isinstance(callbacks, keras.callbacks.CallbackList):
            callbacks.callbacks = own
            return callbacks
        return own

    def _dispatcher(
        self,
        model: Any,
        mode: Mode,
        function: TracedStep,
        inputs: Input,
        *,
        collect_interval: float,
    ) -> Dispatching:
        news = budget = None
        if mode is TRAIN and self.num_workers > 1:
            news = FitNews(self._run, model, function, self._run.num_fits - 1)
        if mode is TRAIN and self._max_steps is not None:
            budget = StepBudget(self._run, model, self._max_steps)
        return OwnSteps(
            function,
            inputs,
            split=self.worker_index if inputs.num_splits > 1 else 0,
            devices=self._own_devices,
            seed_offset=self._run.seed_offset,
            news=news,
            budget=budget,
        )

    @property
    def _begins_run(self) -> bool:
        """Whether this process gives the variables their initial values."""
        return self._run.is_new

    @contextlib.contextmanager
    def _limited_to(self, max_steps: int | None) -> Iterator[None]:
        """In this context, have `fit` stop when the steps of all workers are `max_steps`."""
        self._max_steps = max_steps
        try:
            yield
        finally:
            self._max_steps = None

    def _check_eager_steps(self) -> None:
        raise UnsupportedError(
            "Steps that run eagerly read and write variables one by one, and workers would undo "
            "what others have done. Expected: a model compiled without `run_eagerly=True`. "
            "Received: `run_eagerly=True`. Debug with one plain process, or with "
            "`kerasps.ParameterServerStrategy`."
        )


def _is_chief(cluster: ClusterDescription) -> bool:
    if "chief" in cluster.jobs:
        return cluster.task_type == "chief"
    return cluster.task_index == 0


def _chief_text(cluster: ClusterDescription) -> str:
    job = "chief" if "chief" in cluster.jobs else "worker"
    return f"{job} 0 at {cluster.jobs[job][0]}"


def _resolver(cluster: ClusterDescription) -> Any:
    """Return a cluster resolver that TensorFlow's constructor takes, with this task as chief."""
    jobs = {job: list(tasks) for job, tasks in cluster.jobs.items()}
    jobs["chief"] = [str(cluster.address)]
    return tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(jobs), task_type="chief", task_id=0, rpc_layer="grpc"
    )


def _share_of(creator: DatasetCreator, num_workers: int, worker: int) -> DatasetCreator:
    """Return a creator of the dataset of one worker, whoever asks."""
    context = tf.distribute.InputContext(num_workers, worker, num_replicas_in_sync=1)
    return DatasetCreator(lambda _: creator(context), creator.input_options)


def _listed(callbacks: Any) -> list[Any]:
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return list(callbacks.callbacks)
    return list(keras.tree.flatten(callbacks)) if callbacks is not None else []


def _drives_no_steps(cluster: ClusterDescription) -> ClusterConfigError:
    if cluster.task_type == EVALUATOR:
        fix = "An evaluator creates no strategy: it reads checkpoints."
    else:
        fix = "Run `kerasps serve` in this ps task, and the script in the workers and the chief."
    return ClusterConfigError(
        "A WorkerDrivenStrategy is created by workers, and by the chief where there is one. "
        "Expected: task type 'worker' or 'chief'. Received: task type "
        f"{cluster.task_type!r}, index {cluster.task_index}. {fix}"
    )
