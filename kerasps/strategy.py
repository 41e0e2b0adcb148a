"""`ParameterServerStrategy`: connects to a cluster and decides where variables go."""

from __future__ import annotations

import atexit
import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from kerasps import _compat
from kerasps.cluster import ClusterDescription, check_cluster_resolver, read_tf_config, require_chief, wait_until_reachable
from kerasps.errors import KeraspsError
from kerasps.placement import Placement, PlacementLedger
from kerasps.storage import NamedVariable, mutex_name

COORDINATOR_CPU = "/job:chief/replica:0/task:0/device:CPU:0"


class ParameterServerStrategy(tf.distribute.ParameterServerStrategy):
    """Trains Keras 3 models on worker and ps tasks, with `model.fit` unchanged.

    A model that is made and compiled under `scope()` keeps its variables on the ps tasks; `fit` runs its training steps on the
    workers. The process that makes the strategy is the coordinator (the `chief` task). A process connects to one cluster in
    its life, which is TensorFlow's limit. Connecting resets TensorFlow's runtime: make the strategy before any other model.

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
        variable_partitioner: a callable of `shape` and `dtype` that returns the number of shards per axis, as
            `tf.distribute.experimental.partitioners` does. It splits a bare `tf.Variable`; Keras variables stay whole.
        connect_timeout: seconds to wait for every task to be reachable. Defaults to the environment variable
            `KERASPS_CONNECT_TIMEOUT`, else 60.

    Raises:
        ClusterConfigError: the cluster's description is wrong: the message says what and how to mend it.
        TaskUnreachableError: tasks, named, did not answer within `connect_timeout`.
        KeraspsError: this process is connected to a cluster already.

    Follows `tf.distribute.ParameterServerStrategy`.
    """

    _connected = threading.Lock()

    def __init__(
        self,
        cluster_resolver: tf.distribute.cluster_resolver.ClusterResolver | None = None,
        variable_partitioner: Callable[..., Any] | None = None,
        *,
        connect_timeout: float | None = None,
    ) -> None:
        if variable_partitioner is not None and not callable(variable_partitioner):
            raise TypeError(
                "Argument `variable_partitioner` must be a callable of `shape` and `dtype`, such as "
                "`tf.distribute.experimental.partitioners.MinSizePartitioner()`. "
                f"Received: variable_partitioner={variable_partitioner!r}"
            )
        if cluster_resolver is None:
            require_chief(read_tf_config())
            cluster_resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
        description = check_cluster_resolver(cluster_resolver)
        if not ParameterServerStrategy._connected.acquire(blocking=False):
            raise KeraspsError(
                "This process is connected to a cluster already, and TensorFlow connects a process once. Expected: one "
                f"ParameterServerStrategy per process. Received: a second one, for {description}. Start another process."
            )
        try:
            wait_until_reachable(description.server_addresses, connect_timeout)
        except BaseException:
            ParameterServerStrategy._connected.release()
            raise
        _hide_gpus_of_coordinator()
        from kerasps import hooks  # imports the trainer, which knows this module

        hooks.install()
        super().__init__(cluster_resolver, variable_partitioner)
        self._extended = _Extended(self, cluster_resolver, variable_partitioner)
        self._description = description
        atexit.register(_leave_remote_functions)
        # A cluster that ends before this process does says so (`LocalCluster`).
        getattr(cluster_resolver, "close_callbacks", []).append(_leave_remote_functions)

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
    def coordinator(self) -> tf.distribute.coordinator.ClusterCoordinator:
        """The `ClusterCoordinator` of this strategy."""
        return tf.distribute.coordinator.ClusterCoordinator(self)

    def placement(self) -> Placement:
        """Variables, bytes and device of every ps task; prints as a table."""
        return self._extended.ledger.placement()

    def __repr__(self) -> str:
        return f"<ParameterServerStrategy num_workers={self.num_workers} num_ps={self.num_ps}>"


class _Placing(threading.local):
    active = False
    on_coordinator = False


class _Extended(_compat.ParameterServerStrategyV2Extended):
    """Places variables: by bytes, each on the lightest ps; a slot beside its variable."""

    def __init__(self, strategy: Any, cluster_resolver: Any, variable_partitioner: Any) -> None:
        super().__init__(strategy, cluster_resolver, variable_partitioner)
        self.ledger = PlacementLedger(self._num_ps)
        self._placing = _Placing()
        self._mutexes: dict[str, tf.Tensor] = {}

    @contextlib.contextmanager
    def placing(self, *, on_coordinator: bool) -> Iterator[None]:
        """While active, a new variable is whole and lives on a ps, or on the coordinator."""
        placing = self._placing
        before = placing.active, placing.on_coordinator
        placing.active, placing.on_coordinator = True, on_coordinator
        try:
            yield
        finally:
            placing.active, placing.on_coordinator = before

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

    def _create_variable(self, next_creator: Any, **kwargs: Any) -> Any:
        if self._placing.active and self._placing.on_coordinator:
            with _compat.colocate_with(None, ignore_existing=True), tf.device(COORDINATOR_CPU):
                return next_creator(**kwargs)
        if self._placing.active:
            next_creator = _named_variable
        if "colocate_with" in kwargs:
            with _compat.colocate_with(None, ignore_existing=True), tf.device(kwargs["colocate_with"].device):
                variable = next_creator(**kwargs)
            self.ledger.add(variable)
            return variable
        if self._placing.active:
            return self._create_variable_round_robin(next_creator, **kwargs)
        return super()._create_variable(next_creator, **kwargs)

    def _create_variable_round_robin(self, next_creator: Any, **kwargs: Any) -> Any:
        # TensorFlow's name for the method that picks a ps; in turn whatever the size there, by bytes here.
        device = f"/job:ps/task:{self.ledger.lightest()}/device:CPU:0"
        with _compat.colocate_with(None, ignore_existing=True), tf.device(device):
            variable = next_creator(**kwargs)
        self.ledger.add(variable)
        return variable

    def _update(self, var: Any, fn: Any, args: Any, kwargs: Any, group: bool) -> Any:
        # Keras applies weight decay through this; during a push the storage is at hand and needs no placing.
        if group:
            return super()._update(var, fn, args, kwargs, group)
        return fn(var, *args, **kwargs)


def _named_variable(initial_value: Any, shape: Any, dtype: Any, trainable: bool, name: str, **unused: Any) -> NamedVariable:
    return NamedVariable(initial_value, shape=shape, dtype=dtype, trainable=trainable, name=name)


def _hide_gpus_of_coordinator() -> None:
    # The coordinator dispatches; were its GPUs visible, its TensorFlow would take their memory from a worker beside it.
    # Too late when TensorFlow has been initialised: then its owner wants the GPU, and keeps it.
    with contextlib.suppress(RuntimeError):
        tf.config.set_visible_devices([], "GPU")


def _leave_remote_functions() -> None:
    # Each function that is deleted from here on would call every task. The tasks forget them with the coordinator anyway;
    # where they have ended already, TensorFlow would print five lines of errors per function.
    _compat.eager_context().remove_function = lambda name: None
