"""`ParameterServerStrategy`: connects to a cluster, and has its models train there."""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from kerasps import _compat, checks, hooks, training
from kerasps.cluster.connection.connect import connect_to_tasks
from kerasps.cluster.connection.disconnection import disconnect
from kerasps.cluster.connection.tf_info import without_info
from kerasps.cluster.description.cluster_description import (
    ClusterDescription,
    read_tf_config,
    require_chief,
)
from kerasps.cluster.description.protocol import ClusterResolver
from kerasps.cluster.description.worker_devices import (
    FIRST_CPU,
    WorkerDevices,
    checked_device_names,
)
from kerasps.cluster.local.cluster_resolver import as_resolver, check_cluster_resolver
from kerasps.cluster.local.local_cluster import LocalCluster
from kerasps.cluster.local.local_registry import local_cluster_of
from kerasps.cluster.members.membership import Membership, WorkerInfo
from kerasps.cluster.members.reachability import wait_until_reachable
from kerasps.errors import KeraspsError
from kerasps.inputs import Input, as_input, makes_quickly_deleted, quickly_deleted
from kerasps.runtime.connected import (
    check_not_closed,
    connected_strategy,
    note_closed,
    remember_connected,
)
from kerasps.runtime.forks import take_note_of_forks
from kerasps.step import Mode, TracedStep
from kerasps.step.contract.inventory import DEFAULT_TABLE_MIN_BYTES
from kerasps.step.running.replica_run import run_in_graph
from kerasps.step.tracing.traffic import LoadReport, TrafficMeter
from kerasps.strategy_arguments import (
    ShardLayout,
    SparseUpdates,
    UpdateMode,
    check_overlap,
    check_tables,
    check_update_mode,
    checked_staleness,
)
from kerasps.variables.away import AwayStates
from kerasps.variables.flights import wait_for_flights
from kerasps.variables.placement import Placement
from kerasps.variables.placing import Extended
from kerasps.variables.row_pools import RowPools

# For steps in flight when the cluster is closed: they fail at once, unless a worker computes.
_LANDING_S = 2.0

_LOGGER = logging.getLogger("kerasps")


class ParameterServerStrategy(tf.distribute.ParameterServerStrategy):
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
            `num_backup_workers` is not an integer, `overlap` not a bool, or `worker_devices` no
            list of names.
        ValueError: `shard_layout`, `sparse_updates`, `table_min_bytes`, `max_staleness`,
            `update_mode`, `num_backup_workers` or `connect_timeout` is not one of its values, two
            of them do not go together, a worker has not all of `worker_devices`, or an argument
            differs from that of the strategy which this process has already.
        UnsupportedError: the backend of Keras is not TensorFlow.
        ImportError: a private name of Keras or TensorFlow is gone in the versions installed.

    Warns:
        UserWarning: this version of Keras or TensorFlow was not tested.
        RuntimeWarning: the coordinator's port is open on every network interface, since
            TensorFlow's server cannot be held to one address, and `KERASPS_BIND` says that it may.

    Follows `tf.distribute.ParameterServerStrategy`.
    """

    _connecting = threading.Lock()

    def __new__(cls, *args: Any, **kwargs: Any) -> ParameterServerStrategy:
        # The constructor that runs next tells whether it is for the same cluster.
        current = connected_strategy()
        return current if type(current) is cls else super().__new__(cls)

    def __init__(
        self,
        cluster_resolver: ClusterResolver | LocalCluster | None = None,
        variable_partitioner: Callable[..., Any] | None = None,
        *,
        shard_layout: ShardLayout = "mod",
        sparse_updates: SparseUpdates = "lazy",
        table_min_bytes: int = DEFAULT_TABLE_MIN_BYTES,
        max_staleness: int | None = None,
        overlap: bool = False,
        update_mode: UpdateMode = "async",
        num_backup_workers: int = 0,
        worker_devices: Sequence[str] | None = None,
        connect_timeout: float | None = None,
    ) -> None:
        _compat.check_backend()
        max_staleness = checked_staleness(max_staleness)
        check_overlap(overlap)
        if cluster_resolver is None:
            require_chief(read_tf_config())
            cluster_resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
        resolver = as_resolver(cluster_resolver)
        description = check_cluster_resolver(resolver)
        arguments: dict[str, Any] = {
            "variable_partitioner": variable_partitioner,
            "shard_layout": shard_layout,
            "sparse_updates": sparse_updates,
            "table_min_bytes": table_min_bytes,
            "max_staleness": max_staleness,
            "overlap": overlap,
            "update_mode": update_mode,
            "num_backup_workers": num_backup_workers,
            "worker_devices": checked_device_names(worker_devices),
        }
        check_update_mode(arguments, len(description.jobs["worker"]))
        self._set_up(resolver, description, arguments, connect_timeout)

    def _set_up(
        self,
        cluster_resolver: ClusterResolver,
        description: ClusterDescription,
        arguments: dict[str, Any],
        connect_timeout: float | None,
    ) -> None:
        """Connect, or check that this is the strategy which this process has already.

        Args:
            cluster_resolver: what TensorFlow's constructor is to get.
            description: the tasks that this process connects to, with itself as their chief.
            arguments: those of the constructor that make one strategy differ from another.
            connect_timeout: as for the constructor.
        """
        check_tables(arguments)
        with ParameterServerStrategy._connecting:
            current = connected_strategy()
            if current is not None:
                check_not_closed("a further strategy")
                current._check_is_wanted(self, description, arguments)
                return
            self._local_cluster = local_cluster_of(description)
            if self._local_cluster is not None:
                self._local_cluster.check_open()
            # What may be missing is looked for before anything is connected or patched.
            _compat.check_overridden()
            hooks.check_patched(hooks.PATCHES)
            _compat.warn_of_untested_versions()
            wait_until_reachable(description.server_addresses, connect_timeout)
            self._description = description
            self._arguments: dict[str, Any] = arguments
            with without_info():
                self._connect(cluster_resolver, arguments["variable_partitioner"])
            remember_connected(self)
            hooks.install(hooks.PATCHES)

    def _check_is_wanted(
        self, other: object, description: ClusterDescription, arguments: dict[str, Any]
    ) -> None:
        """Check that a further call of the constructor asks for this strategy.

        Raises:
            KeraspsError: it asks for another cluster, or for an instance of another class.
            ValueError: one of its arguments differs.
        """
        if description.jobs != self._description.jobs or other is not self:
            raise KeraspsError(
                "This process is connected to a cluster already, and TensorFlow connects a "
                "process once. Expected: the cluster of its first ParameterServerStrategy, "
                f"{_tasks(self._description)}. Received: {_tasks(description)}. Go on with the "
                "first strategy and its cluster: in a notebook, make the cluster in a cell of its "
                "own that runs once. For another cluster, restart the kernel or start another "
                "process."
            )
        for name, value in arguments.items():
            before = self._arguments[name]
            if not checks.are_alike(value, before):
                raise ValueError(
                    f"Argument `{name}` differs from that of the strategy which this process has "
                    f"for this cluster. Expected: {name}={before!r}, which gives that strategy "
                    f"back. Received: {name}={value!r}. Give the first value, or restart the "
                    "process to use another."
                )

    def _connect(self, cluster_resolver: Any, variable_partitioner: Any) -> None:
        """Connect to the cluster, and put our placement in place of TensorFlow's.

        Call once all tasks accept connections.
        """
        self._has_left = False
        if self._local_cluster is not None:
            # Also where what follows fails.
            self._local_cluster.before_close(self._disconnect)
        self._choose_devices()
        for_num_ps = getattr(variable_partitioner, "for_num_ps", None)
        if for_num_ps is not None:
            variable_partitioner = for_num_ps(len(self._description.jobs["ps"]))
        super().__init__(cluster_resolver, variable_partitioner)
        theirs: Any = self._extended
        self._extended: Extended = self._make_extended(cluster_resolver, variable_partitioner)
        # The constructor of a strategy sets this. A `tf.function` that is called in the scope asks
        # for it.
        self._extended._retrace_functions_for_each_device = (
            theirs._retrace_functions_for_each_device
        )
        self._devices = self._find_devices()
        self._traffic_meter = TrafficMeter(self.num_ps)
        self._staleness_meter = training.StalenessMeter(self._extended.fences)
        self._watch(cluster_resolver)
        take_note_of_forks()

        atexit.register(self._before_tasks_end, None)
        if self._local_cluster is not None:
            self._local_cluster.before_close(self._before_tasks_end)
            self._local_cluster.end_with_process()

    def _before_tasks_end(self, closed_by: str | None) -> None:
        """Leave the cluster, once.

        Args:
            closed_by: what closes it, and where; None where this process ends and the tasks are
                somebody else's.
        """
        if closed_by is None:
            hooks.leave_remote_functions()
        if self._has_left:
            return
        self._has_left = True
        if closed_by is None:
            self._leave(is_closed=False)
            return
        note_closed(closed_by)
        self._leave(is_closed=True)
        # Before calls are cancelled: tasks would be told to delete what these were to return.
        self._disconnect(closed_by)
        self._end_calls()

    def _disconnect(self, closed_by: str) -> None:
        """Have this process forget the tasks, where it goes on without them."""
        if self._local_cluster is not None and self._local_cluster.process_ends:
            # TensorFlow would say of each function on the tasks that it cannot be released.
            hooks.leave_remote_functions()
        else:
            disconnect(self._description.server_addresses)

    # What another strategy of the family does in its own way.

    def _choose_devices(self) -> None:
        """Choose which devices this process is to see. Call before it connects."""
        # The coordinator dispatches; were its GPUs visible, its TensorFlow would take their memory
        # from a worker beside it. Too late when TensorFlow has been initialised: then its owner
        # wants the GPU, and keeps it.
        with contextlib.suppress(RuntimeError):
            tf.config.set_visible_devices([], "GPU")

    def _make_extended(self, cluster_resolver: Any, variable_partitioner: Any) -> Extended:
        """Return what places variables."""
        extended = Extended(
            self, cluster_resolver, variable_partitioner, self._arguments["shard_layout"]
        )
        if self.sparse_updates == "lazy":  # else tables are updated as a whole
            extended.row_pools = RowPools(self.table_min_bytes)
        return extended

    def _find_devices(self) -> WorkerDevices:
        """Return what knows the devices of workers. Call when connected.

        Raises ValueError where a worker has not all that are wanted.
        """
        devices = WorkerDevices(self.worker_devices)
        devices.check(self._description.jobs.get("worker", ()))
        return devices

    def _leave(self, *, is_closed: bool) -> None:
        """End what was begun by `_watch`.

        Args:
            is_closed: False where the process ends, True where it goes on without the cluster.
        """
        if is_closed:
            self._membership.close()
        else:
            self._membership.stop()

    def _end_calls(self) -> None:
        """End what workers are doing for this process, which goes on without them."""
        self._port.close()
        wait_for_flights(_LANDING_S)

    @property
    def _num_readers(self) -> int:
        """How many read an input of `evaluate` or `predict`."""
        return self.num_workers

    def _training_input(self, data: Any, **arguments: Any) -> Input:
        """Return the input of a `fit` that begins. `as_input` says which arguments there are."""
        return as_input(data, self.num_workers, **arguments)

    def _training_callbacks(self, callbacks: Any) -> Any:
        """Return the callbacks of a `fit` in this process, given the user's."""
        return callbacks

    def _dispatcher(
        self,
        model: Any,
        mode: Mode,
        function: TracedStep,
        inputs: Input,
        *,
        collect_interval: float,
    ) -> training.Dispatching:
        """Return what has the executions of a loop done."""
        return training.Dispatcher(self, function, inputs, collect_interval=collect_interval)

    def _settle_calls(self) -> None:
        """Wait for functions that were scheduled: they change variables as steps do."""
        self._scheduled_calls.settle()

    def _check_eager_steps(self) -> None:
        """Raise `UnsupportedError` where steps cannot run as plain Python here."""

    def _watch(self, cluster_resolver: Any) -> None:
        """Keep watch over the tasks from here on, and take workers back that come back."""

        def resolve() -> dict[int, str]:
            workers = cluster_resolver.cluster_spec().as_dict().get("worker", {})
            return dict(workers) if isinstance(workers, dict) else dict(enumerate(workers))

        self._membership = Membership(self._description.server_addresses, resolve)
        self._membership.start()
        coordinator = tf.distribute.coordinator.ClusterCoordinator(self)
        self._scheduled_calls = training.ScheduledCalls(self)
        self._port = training.CoordinatorPort(coordinator)
        self._port.replace_failure_handler(self._membership, self._scheduled_calls)
        self._extended.away = AwayStates(self._extended.mutex)
        self._extended.replica_runner = functools.partial(run_in_graph, self, self._scheduled_calls)

    def _connect_to_cluster(self, coordinator_name: str) -> None:
        # TensorFlow's constructor calls this. Its own would rename the devices of this process.
        self._num_workers = len(self._description.jobs["worker"])
        self._num_ps = len(self._description.jobs["ps"])
        connect_to_tasks(
            self._description, protocol=getattr(self._cluster_resolver, "rpc_layer", None)
        )

    def scope(self) -> Any:
        """Return a context manager: what is made in it is made on the cluster.

        Raises:
            ClusterClosedError: the cluster was closed.
        """
        check_not_closed("`strategy.scope()`")
        return super().scope()

    @property
    def description(self) -> ClusterDescription:
        """The cluster: the addresses of its tasks, by job."""
        return self._description

    @property
    def after_ps_loss(self) -> str:
        """What to do when a ps is lost, for the error that says so."""
        return (
            "Start the ps again and this script with it, from the last checkpoint: "
            "`keras.callbacks.BackupAndRestore` goes on at the step of its last backup."
        )

    @property
    def num_workers(self) -> int:
        """The number of worker tasks, with those that are away."""
        return self._membership.num_workers

    def workers(self) -> list[WorkerInfo]:
        """Return the index, address and status of each worker: who is there, and who is not.

        A worker that is lost is taken back when it answers again. So is one that comes at another
        address, or is new, once `cluster_resolver.cluster_spec()` names it.

        Raises:
            ClusterClosedError: the cluster was closed.
        """
        check_not_closed("`strategy.workers()`")
        return self._membership.workers()

    @property
    def num_ps(self) -> int:
        """The number of ps tasks."""
        return int(self._extended._num_ps)

    @property
    def shard_layout(self) -> ShardLayout:
        """`"mod"` or `"div"`: which rows of a variable are in which shard."""
        layout: ShardLayout = self._arguments["shard_layout"]
        return layout

    @property
    def sparse_updates(self) -> SparseUpdates:
        """`"lazy"` or `"dense"`: what an update means for a table that steps read by rows."""
        meaning: SparseUpdates = self._arguments["sparse_updates"]
        return meaning

    @property
    def table_min_bytes(self) -> int:
        """The bytes from which on a variable that steps read by rows only is a table."""
        return int(self._arguments["table_min_bytes"])

    @property
    def max_staleness(self) -> int | None:
        """How many steps a worker may be ahead of the slowest; None for any number."""
        steps: int | None = self._arguments["max_staleness"]
        return steps

    @property
    def overlap(self) -> bool:
        """Whether a worker pulls for its next step while the push of its last is on the way."""
        return bool(self._arguments["overlap"])

    @property
    def worker_devices(self) -> tuple[str, ...] | None:
        """The names of the devices that compute on each worker; None for those that it has."""
        names: tuple[str, ...] | None = self._arguments["worker_devices"]
        return names

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
        return self._devices.of(worker, self.num_workers)

    def _devices_of_workers(self) -> list[tuple[str, ...]]:
        """Return, for each worker, what `devices_of` does."""
        return self._devices.of_all(self.num_workers)

    @property
    def _own_devices(self) -> tuple[str, ...]:
        """The device that computes what this process does itself, in a tuple."""
        return (FIRST_CPU,)  # its GPUs are the workers'

    @property
    def update_mode(self) -> UpdateMode:
        """`"async"`, or `"sync"` where an update is made of the gradients of all workers."""
        mode: UpdateMode = self._arguments["update_mode"]
        return mode

    @property
    def num_backup_workers(self) -> int:
        """How many workers, the slowest, a synchronous update does not wait for."""
        return int(self._arguments["num_backup_workers"])

    @property
    def coordinator(self) -> tf.distribute.coordinator.ClusterCoordinator:
        """The `ClusterCoordinator` of this strategy."""
        return tf.distribute.coordinator.ClusterCoordinator(self)

    def experimental_distribute_dataset(self, dataset: Any, options: Any = None) -> Any:
        """Return a dataset for `coordinator.create_per_worker_dataset`, as TensorFlow documents it.

        It is not tuned by tf.data unless its options say `autotune.enabled = True`.

        Args:
            dataset: the `tf.data.Dataset`.
            options: a `tf.distribute.InputOptions`.
        """
        return super().experimental_distribute_dataset(quickly_deleted(dataset), options)

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[..., tf.data.Dataset], options: Any = None
    ) -> Any:
        """Return a dataset for `coordinator.create_per_worker_dataset`, as TensorFlow documents it.

        It is not tuned by tf.data unless its options say `autotune.enabled = True`.

        Args:
            dataset_fn: given a `tf.distribute.InputContext`, returns a `tf.data.Dataset`.
            options: a `tf.distribute.InputOptions`.
        """
        return super().distribute_datasets_from_function(makes_quickly_deleted(dataset_fn), options)

    def placement(self) -> Placement:
        """Return how many variables and bytes every ps holds, and its device; prints as a table.

        Raises:
            ClusterClosedError: the cluster was closed.
        """
        check_not_closed("`strategy.placement()`")
        return self._extended.ledger.placement()

    def load_report(self) -> LoadReport:
        """Return the traffic of every ps in the running or last `fit`; prints as a table.

        Traffic is what a ps hands out and takes in: rows and bytes, per second.
        """
        return self._traffic_meter.report()

    def staleness(self) -> training.Staleness:
        """Return how stale the updates of the running or last `fit` were; prints as a histogram.

        Of each push, the ps counts how many others it has applied since the worker began to pull
        for the step. After the loss of a ps this is what was read last.
        """
        return self._staleness_meter.report()

    def __repr__(self) -> str:
        return f"<ParameterServerStrategy num_workers={self.num_workers} num_ps={self.num_ps}>"


def _tasks(description: ClusterDescription) -> str:
    return "; ".join(
        f"{job} at {', '.join(addresses)}" for job, addresses in description.jobs.items()
    )
