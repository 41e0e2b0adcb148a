"""`ParameterServerStrategy`: connects to a cluster, and has its models train there."""

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
from kerasps.cluster.local.resolver import resolver_of_tf_config, with_jobs_renamed
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

    A process connects to one cluster in its life, which is TensorFlow's limit. A second strategy
    for the same cluster, as in a notebook's cell that runs again, is the first one; for another
    cluster it is an error. What was made before the strategy stays as it was: models, variables,
    lookup tables, datasets, iterators, compiled functions. Queues and file writers of `tf.summary`
    do not, and a warning names them.

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
            `kerasps.LocalCluster`. A resolver that lists no chief gets this process, at a free
            port of this machine. Default: the one that `TF_CONFIG` describes.
        variable_partitioner: a callable of `shape` and `dtype` that returns the number of shards
            per axis, such as `kerasps.MinSizePartitioner()` or one of
            `tf.distribute.experimental.partitioners`. It splits the first axis of Keras variables,
            and of bare `tf.Variable`s as TensorFlow does. Default: every variable is whole.
        shard_layout: which rows of a Keras variable are in which shard. `"mod"` (the default) deals
            them out in turn, which spreads ids that are sorted by frequency evenly; `"div"` gives
            each shard a contiguous range.
        sparse_updates: what an update means for a table that steps read by rows only (an
            embedding). `"lazy"` (the default): the optimizer sees the rows of the step alone, so
            that a step costs the same whatever the table's height. `"dense"`: the optimizer sees
            the whole table, with gradients of zero in all other rows, as in plain Keras; the ps
            pays for it. The two are the same for SGD without momentum, Adagrad and others that
            leave a row with a gradient of zero alone.
        table_min_bytes: variables of fewer bytes are no tables: steps read them whole, with all
            else that is small, and their updates are Keras's own, whatever `sparse_updates` says.
            With 0, all that steps read by rows only are tables. Default: 32 KiB.
        max_staleness: how many steps of a `fit` a worker may be ahead of the slowest; one that is
            waits. A worker that is lost, or has no data left, is not waited for, and one that joins
            begins where the slowest is. An execution has at most so many steps, whatever
            `steps_per_execution` says. Default: no worker waits for another.
        overlap: whether a worker pulls for its next step while the push of its last one is on the
            way, within an execution. A step then costs less of the network's latency, and is worked
            out with values that may lack the worker's own last update. Default False: one worker
            equals plain Keras.
        update_mode: when an update is made. `"async"` (the default): when a worker's gradients
            arrive. `"sync"`: when those of every worker's step are in, of their mean; so two
            workers equal one process that trains on both batches at a time. A worker that is lost,
            or has no data left, is not waited for.
        num_backup_workers: how many workers, the slowest of each step, a synchronous update does
            not wait for. What they bring is dropped. Default: 0.
        worker_devices: the names of the devices that compute on each worker, one replica each, such
            as `["GPU:0", "GPU:1"]`. A worker with R devices takes R batches for one update: it
            pulls once, and pushes the sum of their gradients once. Steps are counted in batches.
            Default: all GPUs of each worker, or its first CPU where it has none.
        wire_dtype: the dtype in which values and gradients of float32 variables travel between ps
            and workers: `"bfloat16"` halves the bytes, and keeps the range of float32;
            `"float16"` keeps three bits more of each number, and loses gradients of less than
            6e-8. They are summed, stored and updated in float32. A dictionary chooses by the
            variable's path: of `{"embedding": "bfloat16"}`, the first key that is a part of it;
            without one, and for None, a variable travels in float32. Counters, ids, metrics, and
            the states of layers and optimizers always travel as they are. Default: None.
        jit_compile_updates: whether XLA compiles the updates of values of more than 256 KiB, for
            fewer passes over value, gradient and slots. From 1 MiB on they take half the time or
            less. They differ from plain Keras's in the last bits. SGD's need no XLA and are the
            same. Default True.
        connect_timeout: seconds to wait for every task to be reachable. Default: the environment
            variable `KERASPS_CONNECT_TIMEOUT`, else 60.

    Raises:
        ClusterConfigError: the cluster's description is wrong, or the chief's entry is no address
            of this machine and `KERASPS_BIND` names none; the message says how to mend it.
        TaskUnreachableError: tasks, named, did not answer within `connect_timeout`.
        TaskStartError: the chief's port is in use, or TensorFlow's server cannot be held to one
            address.
        ClusterClosedError: the cluster, or the one that this process was connected to, is closed.
        KeraspsError: this process is connected to another cluster already.
        TypeError: `variable_partitioner` cannot be called, `table_min_bytes`, `max_staleness` or
            `num_backup_workers` is not an integer, `overlap` or `jit_compile_updates` not a bool,
            or `worker_devices` no list of names; or `wire_dtype` names no dtypes.
        ValueError: `shard_layout`, `sparse_updates`, `table_min_bytes`, `max_staleness`,
            `update_mode`, `num_backup_workers`, `wire_dtype` or `connect_timeout` is not one of its
            values, two of them do not go together, a worker has not all of `worker_devices`, or an
            argument differs from that of the strategy which this process has already.
        UnsupportedError: the backend of Keras is not TensorFlow.
        ImportError: a private name of Keras or TensorFlow is missing in the versions installed.

    Warns:
        UserWarning: this version of Keras or TensorFlow was not tested.
        RuntimeWarning: the coordinator's port is open on every network interface, since
            TensorFlow's server cannot be held to one address, and `KERASPS_BIND` says that it may.

    Follows `tf.distribute.ParameterServerStrategy`.
    """

    _host: CoordinatorHost

    # Another one in a dry run, which connects to no task.
    _host_type: type[CoordinatorHost] = CoordinatorHost

    def __init__(
        self,
        cluster_resolver: ClusterResolver | LocalCluster | None = None,
        variable_partitioner: Partitioner | None = None,
        *,
        shard_layout: ShardLayout = "mod",
        sparse_updates: SparseUpdates = "lazy",
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
            cluster_resolver = resolver_of_tf_config(require_chief(read_tf_config()))
        resolver = as_resolver(cluster_resolver)
        description = check_cluster_resolver(resolver)
        resolver = with_jobs_renamed(resolver)
        options = StrategyOptions(
            variable_partitioner=variable_partitioner,
            shard_layout=shard_layout,
            sparse_updates=sparse_updates,
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
        self._set_up(self._host_type(description, options, resolver), resolver, connect_timeout)

    def workers(self) -> list[WorkerInfo]:
        """Return the index, address and status of each worker: who is there, and who is not.

        A worker that is lost is taken back when it answers again. So is one that comes at another
        address, or is new, once `cluster_resolver.cluster_spec()` names it.

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
            worker, else its first CPU. Of a worker that is lost, what it had.

        Raises:
            ValueError: there is no such worker.
        """
        return self._host.devices_of(worker)

    @property
    def coordinator(self) -> tf.distribute.coordinator.ClusterCoordinator:
        """The `ClusterCoordinator` of this strategy."""
        return self._host.coordinator

    def staleness(self) -> Staleness:
        """Return how stale the updates of the running or last `fit` were; prints as a histogram.

        Of each push, the ps counts how many others it has applied since the worker began to pull
        for the step. After the loss of a ps this is what was read last.
        """
        return self._host.staleness_meter.report()

    def __repr__(self) -> str:
        return f"<ParameterServerStrategy num_workers={self.num_workers} num_ps={self.num_ps}>"
