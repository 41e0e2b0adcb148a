"""`WorkerDrivenStrategy`: each worker's process drives its steps on shared variables."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from kerasps import _compat
from kerasps.base_strategy import BaseStrategy
from kerasps.cluster.description.cluster_description import EVALUATOR, ClusterDescription
from kerasps.cluster.description.protocol import ClusterResolver
from kerasps.cluster.description.tf_config import read_tf_config
from kerasps.cluster.local.cluster_resolver import as_resolver, describe_resolver
from kerasps.cluster.local.local_cluster import LocalCluster
from kerasps.cluster.local.resolver import LocalClusterResolver, resolver_of
from kerasps.errors import ClusterConfigError, UnsupportedError
from kerasps.step.contract.inventory import DEFAULT_TABLE_MIN_BYTES
from kerasps.strategy_arguments import (
    Partitioner,
    ShardLayout,
    SparseUpdates,
    check_jit_compile_updates,
    checked_tables,
)
from kerasps.worker_driven.host import WorkerDrivenOptions, WorkerHost
from kerasps.worker_driven.run import check_run


class _NotOffered:
    """A member of other strategies that this one does not have: its use raises `UnsupportedError`.

    A method raises at the call, which `{given}` in the message names the first argument of.
    """

    def __init__(self, message: str, *, is_method: bool = True) -> None:
        self._message = message
        self._is_method = is_method

    def __get__(self, instance: object, owner: type | None = None) -> Callable[..., NoReturn]:
        if instance is not None and not self._is_method:
            raise UnsupportedError(self._message)
        return self

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        given = next(iter((*args, *kwargs.values())), None)
        name = repr(getattr(given, "__name__", given))
        raise UnsupportedError(self._message.replace("{given}", name))


class WorkerDrivenStrategy(BaseStrategy):
    """Train Keras 3 models with workers that each run the same program, without a coordinator.

    Each worker makes this strategy, builds the model under `scope()`, and calls `model.fit` on its
    share of the data. Variables are on the ps tasks, which run `kerasps serve`. Workers make their
    updates independently, and none is lost: `model.optimizer.iterations` counts the steps of all
    workers. A worker may die, join late or come back, and the others go on. When a worker is killed
    in a step, each ps has applied either all of its part of the step or nothing.

    One worker is the chief: the task `chief` of the cluster or, without one, worker 0. It computes
    as the others do. It also gives the variables their initial values, for which the others wait.
    Only the chief assigns to variables outside of steps, and only its callbacks write files,
    schedule the learning rate or stop the training. At the end of an epoch, its callbacks see the
    logs of all workers; the callbacks of each other worker see the logs of that worker.

    ```python
    # The same script in each worker. TF_CONFIG lists `worker` and `ps` tasks, and names this one.
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
        jit_compile_updates: as for `ParameterServerStrategy`.
        run_id: the name that all workers of a run use. The ps may serve runs of other names at the
            same time. Default: the environment variable `KERASPS_RUN_ID`, else `"run"`.
        chief_timeout: seconds to wait for the chief to give a variable its initial value. Default:
            the environment variable `KERASPS_CHIEF_TIMEOUT`, else 600.
        connect_timeout: seconds to wait for every ps to be reachable. Default: the environment
            variable `KERASPS_CONNECT_TIMEOUT`, else 60.

    Raises:
        ClusterConfigError: the cluster's description is wrong, or this process is a ps or an
            evaluator in it.
        TaskUnreachableError: a ps did not answer within `connect_timeout`, or the chief did not
            begin the run within `chief_timeout`.
        TaskStartError: this worker's port is in use.
        KeraspsError: this process is connected to another cluster already.
        TypeError: `variable_partitioner` cannot be called, `table_min_bytes` is not an integer, or
            `jit_compile_updates` not a bool.
        ValueError: an argument is not one of its values, or differs from that of an earlier
            strategy of this process.
        UnsupportedError: the backend of Keras is not TensorFlow.
        ImportError: a private name of Keras or TensorFlow is missing in the versions installed.

    Follows `tf.compat.v1.distribute.experimental.ParameterServerStrategy`.
    """

    _host: WorkerHost

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        variable_partitioner: Partitioner | None = None,
        *,
        shard_layout: ShardLayout = "mod",
        sparse_updates: SparseUpdates | None = None,
        table_min_bytes: int = DEFAULT_TABLE_MIN_BYTES,
        jit_compile_updates: bool = True,
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
            cluster = describe_resolver(as_resolver(cluster_resolver))
        if cluster.task_type not in ("chief", "worker"):
            raise _drives_no_steps(cluster)
        check_run(run_id, chief_timeout)
        check_jit_compile_updates(jit_compile_updates)
        options = WorkerDrivenOptions(
            variable_partitioner=variable_partitioner,
            shard_layout=shard_layout,
            sparse_updates="lazy" if sparse_updates is None else sparse_updates,
            table_min_bytes=table_min_bytes,
            jit_compile_updates=jit_compile_updates,
            run_id=run_id,
            chief_timeout=chief_timeout,
        )
        host = WorkerHost(cluster, checked_tables(options))
        host.lazy_updates.is_default = sparse_updates is None
        self._set_up(host, resolver_of(cluster), connect_timeout)

    @property
    def is_chief(self) -> bool:
        """True if this process is the chief, which writes files and sees merged metrics."""
        return self._host.is_chief

    @property
    def worker_index(self) -> int:
        """The index of this process among those that do steps, from 0; a chief comes first."""
        return self._host.worker_index

    def devices_of(self, worker: int) -> tuple[str, ...]:
        """Return the name of the device that computes on a worker: its first GPU, else its CPU.

        Args:
            worker: the `worker_index` of this process.

        Returns:
            One name, such as `"GPU:0"`.

        Raises:
            ValueError: `worker` is another worker. A process knows only its own devices.
        """
        return self._host.devices_of(worker)

    # Members of strategies with a coordinator, and of TensorFlow's strategies.
    coordinator = _NotOffered(
        "A WorkerDrivenStrategy has no ClusterCoordinator. Expected: `model.fit` in each "
        "worker. Received: a use of `strategy.coordinator`. Use "
        "`kerasps.ParameterServerStrategy` to schedule functions on workers.",
        is_method=False,
    )
    workers = _NotOffered(
        "A WorkerDrivenStrategy does not know which workers are there: none depends on "
        "another. Expected: a use of `strategy.description`, which lists them. Received: "
        "`strategy.workers()`. Ask the process manager that starts the workers."
    )
    staleness = _NotOffered(
        "A WorkerDrivenStrategy does not measure staleness: the ps do not know which worker "
        "pushes. Expected: `model.fit` without it. Received: `strategy.staleness()`. Train "
        "with `kerasps.ParameterServerStrategy` to see it."
    )
    run = _NotOffered(
        "A WorkerDrivenStrategy runs steps of models only. Expected: `model.fit`, or "
        "`model.train_on_batch` for a loop of your own. Received: `strategy.run` of "
        "{given}. Override `train_step` to define the step."
    )

    def __repr__(self) -> str:
        task = self.description
        return (
            f"<WorkerDrivenStrategy {task.task_type} {task.task_index} "
            f"num_workers={self.num_workers} num_ps={self.num_ps}>"
        )


def _drives_no_steps(cluster: ClusterDescription) -> ClusterConfigError:
    if cluster.task_type == EVALUATOR:
        fix = "An evaluator creates no strategy: it reads checkpoints."
    else:
        fix = "Run `kerasps serve` in this ps task, and the script in the workers and the chief."
    return ClusterConfigError(
        "A WorkerDrivenStrategy is created only by workers, and by a chief if there is one. "
        "Expected: task type 'worker' or 'chief'. Received: task type "
        f"{cluster.task_type!r}, index {cluster.task_index}. {fix}"
    )
