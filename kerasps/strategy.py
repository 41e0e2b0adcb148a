"""`ParameterServerStrategy`: connects to a cluster, and trains models there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tensorflow as tf

from kerasps import _compat
from kerasps.base_strategy import BaseStrategy
from kerasps.cluster.description.cluster_description import require_chief
from kerasps.cluster.description.protocol import ClusterResolver
from kerasps.cluster.description.tf_config import read_tf_config
from kerasps.cluster.description.worker_devices import checked_device_names
from kerasps.cluster.local.cluster_resolver import as_resolver, check_cluster_resolver
from kerasps.cluster.local.local_cluster import LocalCluster
from kerasps.cluster.local.resolver import resolver_of, with_jobs_renamed
from kerasps.cluster.members.membership import WorkerInfo
from kerasps.coordinator_host import CoordinatorHost
from kerasps.runtime.connected import check_not_closed
from kerasps.step.contract.inventory import DEFAULT_TABLE_MIN_BYTES
from kerasps.strategy_arguments import (
    Partitioner,
    ShardLayout,
    SparseUpdates,
    StrategyOptions,
    UpdateMode,
    WireDtype,
    check_jit_compile_updates,
    check_overlap,
    checked_staleness,
    checked_tables,
    checked_updates,
    checked_wire_dtype,
)
from kerasps.training.contract.staleness import Staleness


class ParameterServerStrategy(BaseStrategy):
    """Train Keras 3 models on worker and ps tasks, with `model.fit` unchanged.

    A model that is made and compiled under `scope()` keeps its variables on the ps tasks; `fit`
    runs its training steps on the workers. The process that makes the strategy is the coordinator
    (the `chief` task).

    A process connects to one cluster in its life, which is TensorFlow's limit. A second call for
    the same cluster, as in a notebook's cell that runs again, returns the first strategy; for
    another cluster it is an error. Models, variables, lookup tables, datasets, iterators and
    compiled functions made before the strategy keep working. Queues and file writers of
    `tf.summary` do not, and a warning names them.

    ```python
    with kerasps.LocalCluster(num_workers=2, num_ps=1) as cluster:
        strategy = kerasps.ParameterServerStrategy(cluster.cluster_resolver)
        with strategy.scope():
            model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(1)])
            model.compile("adam", "mse", steps_per_execution=10)
        model.fit(np.ones((1000, 64)), np.ones(1000), epochs=3)
    ```

    Args:
        cluster_resolver: a `tf.distribute.cluster_resolver.ClusterResolver` whose cluster has at
            least one `worker` and one `ps`, and whose task is the `chief`; or a
            `kerasps.LocalCluster`. If a resolver lists no chief, this process is the chief, at a
            free port of this machine. Default: the cluster that `TF_CONFIG` describes.
        variable_partitioner: a callable of `shape` and `dtype` that returns the number of shards
            per axis, such as `kerasps.MinSizePartitioner()` or one of
            `tf.distribute.experimental.partitioners`. It splits the first axis of Keras variables,
            and of bare `tf.Variable`s as TensorFlow does. Default: every variable is whole.
        shard_layout: the rule that assigns rows of a Keras variable to shards. `"mod"` (the
            default) assigns them in turn, which spreads ids that are sorted by frequency evenly;
            `"div"` gives each shard a contiguous range.
        sparse_updates: the rows that an update covers, for a table that steps read only by rows (an
            embedding). `"lazy"`: the optimizer gets only the rows of the step, so a step costs the
            same for a table of any height. `"dense"`: the optimizer gets the whole table, with
            gradients of zero in all other rows, as in plain Keras, which costs time on the ps. Both
            give the same result for optimizers that do not change a row whose gradient is zero,
            such as Adagrad and SGD without momentum. Default None: `"lazy"`, and the log says so
            once for each other class of optimizer.
        table_min_bytes: the size in bytes of the smallest table. Smaller variables are no tables:
            steps read them whole, together with other small variables, and Keras updates them as
            usual, whatever `sparse_updates` says. With 0, every variable that steps read only by
            rows is a table. Default: 32 KiB.
        max_staleness: the number of steps of a `fit` by which a worker may lead the slowest; beyond
            it, the worker waits. No worker waits for one that is lost or has no data left, and a
            new worker begins level with the slowest. An execution has at most this many steps,
            whatever `steps_per_execution` says. Default: no worker waits for another.
        overlap: whether a worker pulls for its next step while its last push is still in flight,
            within an execution. This hides network latency, but a step's values may lack the
            worker's last update. Default False: one worker equals plain Keras.
        update_mode: the moment of an update. `"async"` (the default): when a worker's gradients
            arrive. `"sync"`: when the gradients of a step of every worker have arrived; the update
            uses their mean, so two workers equal one process that trains on both batches together.
            An update does not wait for a worker that is lost or has no data left.
        num_backup_workers: the number of workers, the slowest of each step, that a synchronous
            update does not wait for. Their late gradients are dropped. Default: 0.
        worker_devices: the names of the devices that compute on each worker, one replica each, such
            as `["GPU:0", "GPU:1"]`. A worker with R devices takes R batches for one update: it
            pulls once, and pushes the sum of their gradients once. Steps are counted in batches.
            Default: all GPUs of each worker, or its first CPU if it has none.
        wire_dtype: the dtype in which ps and workers send values and gradients of float32
            variables. `"bfloat16"` halves the bytes, and keeps the range of float32; `"float16"`
            keeps three bits more of each number, and loses gradients of less than 6e-8. Sums,
            storage and updates stay in float32. A dictionary such as `{"embedding": "bfloat16"}`
            chooses by the variable's path: the first key that the path contains counts; if there
            is none, or its dtype is None, the variable is sent in float32. Counters, ids, metrics,
            and the states of layers and optimizers are always sent unchanged. Default: None.
        jit_compile_updates: whether XLA compiles the updates of values of more than 256 KiB, for
            fewer passes over value, gradient and slots. From 1 MiB on they take half the time or
            less. They differ from plain Keras's in the last bits. SGD's updates need no XLA and
            equal Keras's. Default True.
        connect_timeout: seconds to wait for every task to be reachable. Default: the environment
            variable `KERASPS_CONNECT_TIMEOUT`, else 60.

    Raises:
        ClusterConfigError: the cluster's description is wrong, or the chief's entry is no address
            of this machine and `KERASPS_BIND` names none; the message says how to correct it.
        TaskUnreachableError: tasks, which the message names, did not answer within
            `connect_timeout`.
        TaskStartError: the chief's port is in use, or TensorFlow's server cannot listen on only
            one address.
        ClusterClosedError: the cluster, or the one that this process was connected to, is closed.
        KeraspsError: this process is connected to another cluster already.
        TypeError: `variable_partitioner` is not callable, `table_min_bytes`, `max_staleness` or
            `num_backup_workers` is not an integer, `overlap` or `jit_compile_updates` is not a
            bool, `worker_devices` is not a list of names, or `wire_dtype` names no dtypes.
        ValueError: `shard_layout`, `sparse_updates`, `table_min_bytes`, `max_staleness`,
            `update_mode`, `num_backup_workers`, `wire_dtype` or `connect_timeout` is not one of its
            values, two of them cannot be combined, a worker lacks one of `worker_devices`, or an
            argument differs from that of the strategy that this process already has.
        UnsupportedError: the backend of Keras is not TensorFlow.
        ImportError: a private name of Keras or TensorFlow is missing in the versions installed.

    Warns:
        UserWarning: this version of Keras or TensorFlow was not tested.
        RuntimeWarning: the coordinator's port is open on every network interface, since
            TensorFlow's server cannot listen on only one address, and `KERASPS_BIND` allows it.

    Follows `tf.distribute.ParameterServerStrategy`.
    """

    _host: CoordinatorHost

    def __init__(
        self,
        cluster_resolver: ClusterResolver | LocalCluster | None = None,
        variable_partitioner: Partitioner | None = None,
        *,
        shard_layout: ShardLayout = "mod",
        sparse_updates: SparseUpdates | None = None,
        table_min_bytes: int = DEFAULT_TABLE_MIN_BYTES,
        max_staleness: int | None = None,
        overlap: bool = False,
        update_mode: UpdateMode = "async",
        num_backup_workers: int = 0,
        worker_devices: Sequence[str] | None = None,
        wire_dtype: WireDtype | Mapping[str, WireDtype | None] | None = None,
        jit_compile_updates: bool = True,
        connect_timeout: float | None = None,
    ) -> None:
        _compat.check_backend()
        max_staleness = checked_staleness(max_staleness)
        check_overlap(overlap)
        check_jit_compile_updates(jit_compile_updates)
        if cluster_resolver is None:
            cluster_resolver = resolver_of(require_chief(read_tf_config()))
        resolver = as_resolver(cluster_resolver)
        description = check_cluster_resolver(resolver)
        options = StrategyOptions(
            variable_partitioner=variable_partitioner,
            shard_layout=shard_layout,
            sparse_updates="lazy" if sparse_updates is None else sparse_updates,
            table_min_bytes=table_min_bytes,
            max_staleness=max_staleness,
            overlap=overlap,
            update_mode=update_mode,
            num_backup_workers=num_backup_workers,
            worker_devices=checked_device_names(worker_devices),
            wire_dtype=checked_wire_dtype(wire_dtype),
            jit_compile_updates=jit_compile_updates,
        )
        options = checked_updates(checked_tables(options), len(description.jobs["worker"]))
        host = CoordinatorHost(description, options, resolver)
        host.lazy_updates.is_default = sparse_updates is None
        self._set_up(host, with_jobs_renamed(resolver, description), connect_timeout)

    def workers(self) -> list[WorkerInfo]:
        """Return the index, address and status of each worker, lost ones included.

        The strategy takes a lost worker back when it answers again. It takes a worker at another
        address, or a new one, once `cluster_resolver.cluster_spec()` names it.

        Raises:
            ClusterClosedError: the cluster was closed.
        """
        check_not_closed("`strategy.workers()`")
        return self._host.membership.workers()

    def devices_of(self, worker: int) -> tuple[str, ...]:
        """Return the names of the devices that compute on a worker, one replica each.

        Args:
            worker: the index of the worker.

        Returns:
            Names such as `"GPU:0"`, at least one: those of `worker_devices`, else all GPUs of the
            worker, else its first CPU. For a lost worker, the devices that it had.

        Raises:
            ValueError: there is no such worker.
        """
        return self._host.devices_of(worker)

    @property
    def coordinator(self) -> tf.distribute.coordinator.ClusterCoordinator:
        """The `ClusterCoordinator` of this strategy."""
        return self._host.coordinator

    def staleness(self) -> Staleness:
        """Return the staleness of updates in the running or last `fit`; prints as a histogram.

        The staleness of a push is the number of others that the ps has applied since the worker
        began to pull for the step. After the loss of a ps this returns the last counts read.
        """
        return self._host.staleness_meter.report()

    def __repr__(self) -> str:
        return f"<ParameterServerStrategy num_workers={self.num_workers} num_ps={self.num_ps}>"
