"""Places variables on ps tasks: by bytes, small ones together, and a slot beside its variable."""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from kerasps import _compat
from kerasps.cluster.description.protocol import ClusterResolver
from kerasps.runtime.devices import COORDINATOR_CPU, ps_device
from kerasps.strategy_arguments import Partitioner
from kerasps.variables.lanes.fences import Fences
from kerasps.variables.lanes.phase import current_phase, num_replicas
from kerasps.variables.placing.placement import PlacementLedger
from kerasps.variables.rows.row_pools import RowPools
from kerasps.variables.rows.sharding import LAYOUTS, ShardedStorage, Sharding
from kerasps.variables.storage.kinds import TABLE_NAME
from kerasps.variables.storage.named import (
    NamedIndex,
    NamedVariable,
    mutex_name,
    on_own_task,
    plain_variable,
)
from kerasps.variables.storage.wire import WireRule

# TensorFlow sends no tensor of more than 2 GiB to another task. A larger variable is split into
# shards of half of that, so that two fit where one did.
MAX_SENT_BYTES = 2**31 - 2**20
# TensorFlow's look-ups on a ps count the rows of a shard in 32 bits.
MAX_SHARD_ROWS = 2**31 - 1


class _Placing(threading.local):
    """The options of the variables that this thread makes."""

    active = False
    device: str | None = None
    beside: ShardedStorage | None = None
    beside_whole: bool = False
    order: Iterator[int] = iter(())


class Extended(_compat.ParameterServerStrategyV2Extended):
    """Places variables by bytes (see `PlacementLedger`), and a slot beside its variable.

    TensorFlow's strategy asks this object where to put a new variable. Methods with an underscore
    override those of TensorFlow's class; the start of a strategy checks that they exist there.
    """

    # True if small variables may be fused while steps run: if one process drives the steps.
    may_fuse = True
    # The host that drives steps on these variables (`training.Host`); None until the strategy is
    # connected.
    host: object = None
    # The pools in which new tables are made; None if each table is stored separately.
    row_pools: RowPools | None = None
    # The pools of tables without a vocabulary; None until the strategy is connected.
    key_pools: Any = None
    # The dtype in which new variables are sent.
    wire_rule = WireRule()

    @property
    def restores(self) -> bool:
        """True if this process writes the values of checkpoints to variables."""
        return True

    def __init__(
        self,
        strategy: tf.distribute.ParameterServerStrategy,
        cluster_resolver: ClusterResolver,
        variable_partitioner: Partitioner | None,
        shard_layout: str,
    ) -> None:
        super().__init__(strategy, cluster_resolver, variable_partitioner)
        self._strategy = weakref.ref(strategy)
        self.num_ps = len(cluster_resolver.cluster_spec().as_dict().get("ps", ()))
        self.ledger = PlacementLedger(self.num_ps)
        self._partitioner = variable_partitioner
        self._shard_layout = shard_layout
        self._placing = _Placing()
        self._mutexes: dict[str, tf.Tensor] = {}
        self.fences = Fences(self.mutex)
        # For functions of custom loops, supplied by the strategy: the stand-ins of states
        # (`StandIns`), and the function that traces a replica's function.
        self.stand_ins: Any = None
        self.replica_runner: Callable[[Callable[..., Any], Any, Any], Any] | None = None
        self.new_variable: Callable[..., NamedVariable] = NamedVariable
        self.new_index: Callable[[str, int], NamedIndex] = NamedIndex

    @contextlib.contextmanager
    def placing(self, device: str | None) -> Iterator[None]:
        """In this context, create variables whole on `device`; None lets the ledger choose.

        Thread: applies to the current thread only.
        """
        placing = self._placing
        before = placing.active, placing.device
        placing.active, placing.device = True, device
        try:
            yield
        finally:
            placing.active, placing.device = before

    def shards(
        self, shape: tuple[int, ...], dtype: tf.DType, name: str
    ) -> tuple[Sharding, list[str]] | None:
        """Return the sharding of a new variable and the device of each shard; None if it is whole.

        A slot, which is made beside its variable, is sharded like that variable. A variable that
        cannot be sent whole is split, without a partitioner too. Raises ValueError if the
        partitioner splits an axis other than the first, or leaves a shard with more rows than
        TensorFlow can count.
        """
        beside = self._placing.beside
        if beside is not None:
            same = tuple(beside.shape) == shape
            return (
                (beside.sharding, [str(shard.device) for shard in beside.shards]) if same else None
            )
        if not shape or self._placing.beside_whole:
            return None
        count = self._chosen_count(shape, dtype)
        num_bytes = math.prod(shape) * dtype.size
        # A table is read by rows, so all of it is never sent at once.
        if name != TABLE_NAME and num_bytes > MAX_SENT_BYTES * count:
            count = min(math.ceil(num_bytes / (MAX_SENT_BYTES // 2)), shape[0])
        if shape[0] > MAX_SHARD_ROWS * count:
            least = math.ceil(shape[0] / MAX_SHARD_ROWS)
            raise ValueError(
                f"Variable '{name}' has more rows than TensorFlow can look up in a shard. "
                f"Expected: at most {MAX_SHARD_ROWS:,} rows a shard. Received: {shape[0]:,} rows "
                f"in {count:,} shard(s). Pass `kerasps.FixedShardsPartitioner({max(2, least)})` as "
                "`variable_partitioner` to the strategy."
            )
        if count <= 1:
            return None
        return LAYOUTS[self._shard_layout](shape[0], count), [
            ps_device(ps) for ps in self.ledger.spread(count)
        ]

    def _chosen_count(self, shape: tuple[int, ...], dtype: tf.DType) -> int:
        """Return the number of shards that the partitioner chooses, at least 1."""
        if self._partitioner is None:
            return 1
        partitions = list(self._partitioner(shape=tf.TensorShape(shape), dtype=dtype))
        if len(partitions) != len(shape) or any(count != 1 for count in partitions[1:]):
            raise ValueError(
                "Argument `variable_partitioner` may split the first axis only. Expected: the "
                f"number of shards per axis, 1 for all but the first. Received: {partitions} for "
                f"shape {shape}. Use a partitioner of kerasps."
            )
        return max(1, min(int(partitions[0]), shape[0]))

    @property
    def beside(self) -> ShardedStorage | None:
        """The storage in shards beside which this thread makes variables, if any."""
        return self._placing.beside

    def takes_table(self, name: str, shape: tuple[int, ...], dtype: tf.DType) -> bool:
        """Return whether a new variable is a table that may share a storage with others."""
        placing = self._placing
        is_beside = placing.beside is not None or placing.beside_whole
        pools = self.row_pools
        return pools is not None and not is_beside and pools.takes(name, shape, dtype)

    def next_device(self, shape: Sequence[int], dtype: tf.DType) -> str:
        """Return the device of the ps that the ledger chooses for the next variable."""
        return ps_device(self.ledger.place(math.prod(shape) * dtype.size))

    def shards_beside(self, shape: tuple[int, ...], count: int) -> Sequence[Any]:
        """Return, for each of `count` shards of a new variable, the shard that it is a slot of.

        The entries are None if the variable is made beside none, or beside one of another shape.
        """
        beside = self._placing.beside
        if beside is None or tuple(beside.shape) != shape:
            return [None] * count
        return beside.shards

    @contextlib.contextmanager
    def colocate_vars_with(
        self, colocate_with_variable: tf.Variable | ShardedStorage
    ) -> Iterator[None]:
        """In this context, create variables beside the given one.

        Beside a sharded variable, new variables of its shape are sharded like it. Beside a whole
        one, all are whole. Thread: applies to the current thread only.
        """
        is_sharded = isinstance(colocate_with_variable, ShardedStorage)
        placing = self._placing
        before = placing.beside, placing.beside_whole
        placing.beside = colocate_with_variable if is_sharded else None
        placing.beside_whole = not is_sharded
        try:
            with (
                contextlib.nullcontext()
                if is_sharded
                else super().colocate_vars_with(colocate_with_variable)
            ):
                yield
        finally:
            placing.beside, placing.beside_whole = before

    def mutex(self, device: str) -> tf.Tensor:
        """Return the lock that one push at a time holds on the ps `device`."""
        if device not in self._mutexes:
            with tf.init_scope(), tf.device(device):
                self._mutexes[device] = on_own_task(
                    lambda: tf.raw_ops.MutexV2(container="", shared_name=mutex_name(device)),
                    is_repeatable=True,
                )
        return self._mutexes[device]

    @property
    def _num_replicas_in_sync(self) -> int:
        return num_replicas()

    def _call_for_each_replica(
        self, fn: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]
    ) -> Any:
        if tf.executing_eagerly() or current_phase() is not None or self.replica_runner is None:
            with tf.distribute.ReplicaContext(self._strategy(), 0):
                return fn(*_local(args), **_local(kwargs))
        return self.replica_runner(fn, _local(args), _local(kwargs))

    def _use_merge_call(self) -> bool:
        return False

    def _create_var_creator(self, next_creator: Callable[..., object], **kwargs: object) -> Any:
        # TensorFlow would wrap variables for caching and aggregation, which pull and push do here.
        return next_creator

    def _resource_creator_scope(self) -> list[Any]:
        # TensorFlow would copy each StaticHashTable that is made in the scope to each worker, for
        # ever, used or not. `lookup_tables` copies tables, made anywhere, only to workers that use
        # them, and only while they exist.
        return []

    def _create_variable(self, next_creator: Callable[..., object], **kwargs: Any) -> Any:
        placing = self._placing
        if not placing.active:
            _compat.check_not_keras_2(kwargs.get("name"))
            beside = kwargs.get("colocate_with")
            # The order of ps for shards: each ps once before any gets a second shard.
            placing.order = itertools.cycle(self.ledger.spread(self.num_ps))
            return (
                self._create_on(beside.device, next_creator, kwargs)
                if beside
                else super()._create_variable(next_creator, **kwargs)
            )
        if placing.device == COORDINATOR_CPU:
            # Without `next_creator`: if no strategy is current at the moment, that is the default
            # strategy's.
            return self._create_on(placing.device, plain_variable, kwargs)
        if placing.device is not None:
            device = placing.device
        elif "colocate_with" in kwargs:
            device = kwargs["colocate_with"].device
        elif placing.beside is not None:
            device = placing.beside.device
        else:
            device = self.next_device(kwargs["shape"], tf.as_dtype(kwargs["dtype"]))
            return self._create_on(device, self._make_variable, kwargs, is_placed=True)
        return self._create_on(device, self._make_variable, kwargs)

    def _make_variable(
        self,
        initial_value: Callable[[], object],
        shape: tf.TensorShape | Sequence[int],
        dtype: tf.DType | str,
        trainable: bool,
        name: str,
        **unused: object,
    ) -> NamedVariable:
        """Make a variable with a name on its task, on the current device."""
        return self.new_variable(
            initial_value, shape=shape, dtype=dtype, trainable=trainable, name=name
        )

    def before_steps(self, variables: Iterable[keras.Variable]) -> None:
        """Take note that steps are about to use these `ParameterServerVariable`s.

        This class does nothing: one process makes variables, each with its initial value.
        """

    def _create_on(
        self,
        device: str,
        creator: Callable[..., Any],
        kwargs: dict[str, Any],
        *,
        is_placed: bool = False,
    ) -> Any:
        with _without_colocation(), tf.device(device):
            variable = creator(**kwargs)
            self.ledger.add(variable, is_placed=is_placed)
        return variable

    def _create_variable_round_robin(
        self, next_creator: Callable[..., object], **kwargs: object
    ) -> Any:
        # TensorFlow's name for the method that picks a ps. TensorFlow takes them in turn whatever
        # the size; kerasps goes by bytes.
        return self._create_on(ps_device(next(self._placing.order)), next_creator, kwargs)

    def _update(
        self,
        var: tf.Variable | ShardedStorage,
        fn: Callable[..., object],
        args: Sequence[object],
        kwargs: Mapping[str, object],
        group: bool,
    ) -> Any:
        # Keras applies weight decay through this. A push runs on the ps of the storage already, so
        # nothing needs placing.
        if group and not isinstance(var, ShardedStorage):
            return super()._update(var, fn, args, kwargs, group)
        return fn(var, *args, **kwargs)


def _without_colocation() -> contextlib.AbstractContextManager[Any]:
    """Leave the colocation scopes of a graph that is being built, which override a device scope."""
    if tf.executing_eagerly():
        return contextlib.nullcontext()
    graph: Any = tf.compat.v1.get_default_graph()
    return graph.colocate_with(None, ignore_existing=True)  # type: ignore[no-any-return]


def _local(values: object) -> Any:
    """Return arguments with each per-replica value replaced by that of the only replica."""
    return tf.nest.map_structure(
        lambda v: v.values[0] if isinstance(v, tf.distribute.DistributedValues) else v, values
    )


def is_ours(strategy: tf.distribute.Strategy) -> bool:
    """Return whether `strategy` is a `kerasps.ParameterServerStrategy`."""
    return isinstance(strategy.extended, Extended)
