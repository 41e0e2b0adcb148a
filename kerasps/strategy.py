"""`ParameterServerStrategy`: connects to a cluster and decides where variables go."""

from __future__ import annotations

import atexit
import contextlib
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from kerasps import _compat, connection
from kerasps.cluster import ClusterDescription, check_cluster_resolver, read_tf_config, require_chief, wait_until_reachable
from kerasps.errors import KeraspsError
from kerasps.load import LoadMeter, LoadReport
from kerasps.local_cluster import LocalCluster
from kerasps.placement import COORDINATOR_CPU, Placement, PlacementLedger, ps_device
from kerasps.sharding import LAYOUTS, ShardedStorage, Sharding
from kerasps.storage import NamedVariable, mutex_name, plain_variable


class ParameterServerStrategy(tf.distribute.ParameterServerStrategy):
    """Trains Keras 3 models on worker and ps tasks, with `model.fit` unchanged.

    A model that is made and compiled under `scope()` keeps its variables on the ps tasks; `fit` runs its training steps on the
    workers. The process that makes the strategy is the coordinator (the `chief` task).

    A process connects to one cluster in its life, which is TensorFlow's limit. A second strategy for the same cluster, as in a
    notebook's cell that runs again, is the first one; for another cluster it is an error. What was made before the strategy
    stays as it was: models, variables, lookup tables, datasets, iterators, compiled functions. Queues and file writers of
    `tf.summary` do not, and a warning names them.

    ```python
    with kerasps.LocalCluster(num_workers=2, num_ps=1) as cluster:
        strategy = kerasps.ParameterServerStrategy(cluster.cluster_resolver)
        with strategy.scope():
            model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(1)])
            model.compile("adam", "mse", steps_per_execution=10)
        model.fit(kerasps.DatasetCreator(dataset_fn), epochs=3, steps_per_epoch=500)
    ```

    Args:
        cluster_resolver: a `tf.distribute.cluster_resolver.ClusterResolver` whose cluster has one `chief`, at least one
            `worker` and at least one `ps`, and whose task is the chief. Defaults to the one that `TF_CONFIG` describes.
        variable_partitioner: a callable of `shape` and `dtype` that returns the number of shards per axis, such as
            `kerasps.MinSizePartitioner()` or one of `tf.distribute.experimental.partitioners`. It splits the first axis of
            Keras variables, and of bare `tf.Variable`s as TensorFlow does. Default: every variable is whole.
        shard_layout: which rows of a Keras variable are in which shard. `"mod"` (the default) deals them out in turn, which
            spreads ids that are sorted by frequency evenly; `"div"` gives each shard a contiguous range.
        sparse_updates: what an update means for a table that steps read by rows only (an embedding). `"lazy"` (the default):
            the optimizer sees the rows of the step alone, so that a step costs the same whatever the table's height. `"dense"`:
            the optimizer sees the whole table, with gradients of zero in all other rows, as in plain Keras; the ps pays for it.
            The two are the same for SGD without momentum, Adagrad and others that leave a row with a gradient of zero alone.
        connect_timeout: seconds to wait for every task to be reachable. Defaults to the environment variable
            `KERASPS_CONNECT_TIMEOUT`, else 60.

    Raises:
        ClusterConfigError: the cluster's description is wrong: the message says what and how to mend it.
        TaskUnreachableError: tasks, named, did not answer within `connect_timeout`.
        TaskStartError: the chief's port is in use.
        KeraspsError: this process is connected to another cluster already.

    Follows `tf.distribute.ParameterServerStrategy`.
    """

    _connecting = threading.Lock()
    _current: ParameterServerStrategy | None = None

    def __new__(cls, *args: Any, **kwargs: Any) -> ParameterServerStrategy:
        # The constructor that runs next tells whether it is for the same cluster.
        current = ParameterServerStrategy._current
        return current if type(current) is cls else super().__new__(cls)

    def __init__(
        self,
        cluster_resolver: tf.distribute.cluster_resolver.ClusterResolver | None = None,
        variable_partitioner: Callable[..., Any] | None = None,
        *,
        shard_layout: str = "mod",
        sparse_updates: str = "lazy",
        connect_timeout: float | None = None,
    ) -> None:
        _check_choice("shard_layout", shard_layout, LAYOUTS)
        _check_choice("sparse_updates", sparse_updates, ("lazy", "dense"))
        if variable_partitioner is not None and not callable(variable_partitioner):
            raise TypeError(
                "Argument `variable_partitioner` must be a callable of `shape` and `dtype`, such as "
                "`kerasps.MinSizePartitioner()`. "
                f"Received: variable_partitioner={variable_partitioner!r}"
            )
        if cluster_resolver is None:
            require_chief(read_tf_config())
            cluster_resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
        description = check_cluster_resolver(cluster_resolver)
        arguments: dict[str, Any] = {
            "variable_partitioner": variable_partitioner,
            "shard_layout": shard_layout,
            "sparse_updates": sparse_updates,
        }
        with ParameterServerStrategy._connecting:
            current = ParameterServerStrategy._current
            if current is not None:
                current._check_is_wanted(self, description, arguments)
                return
            wait_until_reachable(description.server_addresses, connect_timeout)
            self._description = description
            self._arguments: dict[str, Any] = arguments
            self._connect(cluster_resolver, variable_partitioner)
            ParameterServerStrategy._current = self

    def _check_is_wanted(self, other: object, description: ClusterDescription, arguments: dict[str, Any]) -> None:
        if description.jobs != self._description.jobs or other is not self:
            raise KeraspsError(
                "This process is connected to a cluster already, and TensorFlow connects a process once. Expected: the cluster "
                f"of its first ParameterServerStrategy, {_tasks(self._description)}. Received: {_tasks(description)}. Go on "
                "with the first strategy and its cluster: in a notebook, make the cluster in a cell of its own that runs once. "
                "For another cluster, restart the kernel or start another process."
            )
        for name, value in arguments.items():
            before = self._arguments[name]
            if not _are_alike(value, before):
                raise ValueError(
                    f"Argument `{name}` differs from that of the strategy which this process has for this cluster. Expected: "
                    f"{name}={before!r}, which gives that strategy back. Received: {name}={value!r}. Give the first value, or "
                    "restart the process to use another."
                )

    def _connect(self, cluster_resolver: Any, variable_partitioner: Any) -> None:
        _hide_gpus_of_coordinator()
        for_num_ps = getattr(variable_partitioner, "for_num_ps", None)
        if for_num_ps is not None:
            variable_partitioner = for_num_ps(len(self._description.jobs["ps"]))
        super().__init__(cluster_resolver, variable_partitioner)
        theirs: Any = self._extended
        self._extended: _Extended = _Extended(self, cluster_resolver, variable_partitioner, self._arguments["shard_layout"])
        # What the constructor of a strategy sets; a `tf.function` that is called in the scope asks for it.
        self._extended._retrace_functions_for_each_device = theirs._retrace_functions_for_each_device
        self._load_meter = LoadMeter(self.num_ps)
        from kerasps import hooks  # imports the trainer, which knows this module

        hooks.install(self)
        atexit.register(_leave_remote_functions)
        local_cluster = getattr(cluster_resolver, "cluster", None)
        if isinstance(local_cluster, LocalCluster):
            local_cluster.end_with_process(_leave_remote_functions)

    def _connect_to_cluster(self, coordinator_name: str) -> None:
        # What TensorFlow's constructor calls.
        self._num_workers = len(self._description.jobs["worker"])
        self._num_ps = len(self._description.jobs["ps"])
        connection.connect(self._description, protocol=self._cluster_resolver.rpc_layer)

    @property
    def description(self) -> ClusterDescription:
        """The cluster: the addresses of its tasks, by job."""
        return self._description

    @property
    def num_workers(self) -> int:
        """The number of worker tasks."""
        return int(self._extended._num_workers)

    @property
    def num_ps(self) -> int:
        """The number of ps tasks."""
        return int(self._extended._num_ps)

    @property
    def sparse_updates(self) -> str:
        """`"lazy"` or `"dense"`: what an update means for a table that steps read by rows."""
        return str(self._arguments["sparse_updates"])

    @property
    def coordinator(self) -> tf.distribute.coordinator.ClusterCoordinator:
        """The `ClusterCoordinator` of this strategy."""
        return tf.distribute.coordinator.ClusterCoordinator(self)

    def placement(self) -> Placement:
        """Variables, bytes and device of every ps task; prints as a table."""
        return self._extended.ledger.placement()

    def load_report(self) -> LoadReport:
        """Rows and bytes that every ps hands out and takes in per second, in the running or last `fit`; prints as a table."""
        return self._load_meter.report()

    @property
    def load_meter(self) -> LoadMeter:
        """Where `fit` counts what `load_report` reports."""
        return self._load_meter

    def __repr__(self) -> str:
        return f"<ParameterServerStrategy num_workers={self.num_workers} num_ps={self.num_ps}>"


class _Placing(threading.local):
    active = False
    device: str | None = None
    beside: ShardedStorage | None = None


class _Extended(_compat.ParameterServerStrategyV2Extended):
    """Places variables: by bytes, each on the lightest ps; a slot beside its variable, shard by shard."""

    def __init__(self, strategy: Any, cluster_resolver: Any, variable_partitioner: Any, shard_layout: str) -> None:
        super().__init__(strategy, cluster_resolver, variable_partitioner)
        self.ledger = PlacementLedger(self._num_ps)
        self._partitioner = variable_partitioner
        self._shard_layout = shard_layout
        self._placing = _Placing()
        self._mutexes: dict[str, tf.Tensor] = {}

    @contextlib.contextmanager
    def placing(self, device: str | None) -> Iterator[None]:
        """While active, a new variable is whole and lives on `device`, or, where that is None, on the ps that is its turn."""
        placing = self._placing
        before = placing.active, placing.device
        placing.active, placing.device = True, device
        try:
            yield
        finally:
            placing.active, placing.device = before

    def shards(self, shape: tuple[int, ...], dtype: tf.DType) -> tuple[Sharding, list[str]] | None:
        """The sharding of a new variable and the device of each shard; None where it stays whole.

        A slot, which is made beside its variable, is sharded as that one is.
        """
        beside = self._placing.beside
        if beside is not None:
            same = tuple(beside.shape) == shape
            return (beside.sharding, [str(shard.device) for shard in beside.shards]) if same else None
        if self._partitioner is None or not shape:
            return None
        partitions = list(self._partitioner(shape=tf.TensorShape(shape), dtype=dtype))
        if len(partitions) != len(shape) or any(count != 1 for count in partitions[1:]):
            raise ValueError(
                "Argument `variable_partitioner` may split the first axis only. Expected: the number of shards per axis, 1 for "
                f"all but the first. Received: {partitions} for shape {shape}. Use a partitioner of kerasps."
            )
        count = min(int(partitions[0]), shape[0])
        if count <= 1:
            return None
        return Sharding(shape[0], count, self._shard_layout), [ps_device(ps) for ps in self.ledger.spread(count)]

    @contextlib.contextmanager
    def colocate_vars_with(self, colocate_with_variable: Any) -> Iterator[None]:
        """While active, new variables lie beside the given one; beside a sharded one, those of its shape are sharded alike."""
        if not isinstance(colocate_with_variable, ShardedStorage):
            with super().colocate_vars_with(colocate_with_variable):
                yield
            return
        placing = self._placing
        before, placing.beside = placing.beside, colocate_with_variable
        try:
            yield
        finally:
            placing.beside = before

    def mutex(self, device: str) -> tf.Tensor:
        """The lock that one push at a time holds on the ps `device`."""
        if device not in self._mutexes:
            with tf.init_scope(), tf.device(device):
                self._mutexes[device] = tf.raw_ops.MutexV2(container="", shared_name=mutex_name(device))
        return self._mutexes[device]

    @property
    def _num_replicas_in_sync(self) -> int:
        return 1

    def _use_merge_call(self) -> bool:
        return False

    def _create_var_creator(self, next_creator: Any, **kwargs: Any) -> Any:
        # TensorFlow wraps variables for caching and aggregation; pull and push do both.
        return next_creator

    def _resource_creator_scope(self) -> list[Any]:
        # TensorFlow would put a copy of each StaticHashTable that is made in the scope on each worker, for good, whether or not
        # it asks. `lookup_tables` brings tables, made anywhere, where they are asked, and as long as they are there.
        return []

    def _create_variable(self, next_creator: Any, **kwargs: Any) -> Any:
        placing = self._placing
        if not placing.active:
            beside = kwargs.get("colocate_with")
            return (
                self._create_on(beside.device, next_creator, kwargs)
                if beside
                else super()._create_variable(next_creator, **kwargs)
            )
        if placing.device == COORDINATOR_CPU:
            # Without the next creator: where no strategy is current for a while, that is the default strategy's.
            return self._create_on(placing.device, plain_variable, kwargs)
        if placing.device is not None:
            device = placing.device
        elif "colocate_with" in kwargs:
            device = kwargs["colocate_with"].device
        elif placing.beside is not None:
            device = placing.beside.device
        else:
            device = ps_device(self.ledger.lightest())
        return self._create_on(device, _named_variable, kwargs)

    def _create_on(self, device: str, creator: Any, kwargs: dict[str, Any]) -> Any:
        with _compat.colocate_with(None, ignore_existing=True), tf.device(device):
            variable = creator(**kwargs)
        self.ledger.add(variable)
        return variable

    def _create_variable_round_robin(self, next_creator: Any, **kwargs: Any) -> Any:
        # TensorFlow's name for the method that picks a ps; in turn whatever the size there, by bytes here.
        return self._create_on(ps_device(self.ledger.lightest()), next_creator, kwargs)

    def _update(self, var: Any, fn: Any, args: Any, kwargs: Any, group: bool) -> Any:
        # Keras applies weight decay through this; during a push the storage is at hand and needs no placing.
        if group and not isinstance(var, ShardedStorage):
            return super()._update(var, fn, args, kwargs, group)
        return fn(var, *args, **kwargs)


def _named_variable(initial_value: Any, shape: Any, dtype: Any, trainable: bool, name: str, **unused: Any) -> NamedVariable:
    return NamedVariable(initial_value, shape=shape, dtype=dtype, trainable=trainable, name=name)


def _check_choice(argument: str, value: Any, choices: Sequence[str]) -> None:
    if value not in choices:
        expected = " or ".join(repr(choice) for choice in choices)
        raise ValueError(
            f"Argument `{argument}` is not one of its values. Expected: {expected}. Received: {argument}={value!r}."
        )


def _tasks(description: ClusterDescription) -> str:
    return "; ".join(f"{job} at {', '.join(addresses)}" for job, addresses in description.jobs.items())


def _are_alike(one: Any, other: Any) -> bool:
    """Whether two arguments mean the same: a cell that runs again makes its partitioner, or its function, anew."""
    if one is other or type(one) is not type(other):
        return one is other
    if isinstance(one, types.FunctionType):
        return _function_parts(one) == _function_parts(other)
    return bool(one == other) or (hasattr(one, "__dict__") and vars(one) == vars(other))


def _function_parts(function: types.FunctionType) -> tuple[Any, ...]:
    code = function.__code__
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    return code.co_code, code.co_consts, code.co_names, function.__defaults__, function.__kwdefaults__, cells


def _hide_gpus_of_coordinator() -> None:
    # The coordinator dispatches; were its GPUs visible, its TensorFlow would take their memory from a worker beside it.
    # Too late when TensorFlow has been initialised: then its owner wants the GPU, and keeps it.
    with contextlib.suppress(RuntimeError):
        tf.config.set_visible_devices([], "GPU")


def _leave_remote_functions() -> None:
    # Each function that is deleted from here on would call every task. The tasks forget them with the coordinator anyway;
    # where they have ended already, TensorFlow would print five lines of errors per function.
    _compat.eager_context().remove_function = lambda name: None
