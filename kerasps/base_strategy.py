"""The base of all strategies with ps tasks: connecting, leaving, and their common properties."""

from __future__ import annotations

import atexit
import functools
import threading
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from kerasps import _compat
from kerasps.base_host import BaseHost
from kerasps.cluster.connection.disconnection import disconnect
from kerasps.cluster.connection.tf_info import without_info
from kerasps.cluster.description.cluster_description import ClusterDescription
from kerasps.cluster.description.protocol import ClusterResolver
from kerasps.cluster.local.local_registry import local_cluster_of
from kerasps.errors import KeraspsError
from kerasps.hooks import patch, table
from kerasps.hooks.functions import leave_remote_functions
from kerasps.inputs import makes_quickly_deleted, quickly_deleted
from kerasps.runtime.connected import (
    check_not_closed,
    connected_strategy,
    note_closed,
    remember_connected,
)
from kerasps.runtime.forks import check_not_forked, take_note_of_forks
from kerasps.runtime.supervision import tell_connected
from kerasps.step.tracing.traffic import LoadReport
from kerasps.strategy_arguments import StrategyOptions
from kerasps.tools.monitoring.reader import StatusReader
from kerasps.tools.monitoring.sockets import StatusSocket
from kerasps.tools.monitoring.status import RunStatus, described
from kerasps.training import Host
from kerasps.variables.placing.placement import Placement
from kerasps.variables.placing.placing import Extended


class _Reports:
    """The reports of a strategy on a run."""

    _host: BaseHost
    _status_reader: StatusReader

    def placement(self) -> Placement:
        """Return the number of variables and bytes on every ps, and its device; prints as a table.

        Raises:
            ClusterClosedError: the cluster was closed.
        """
        check_not_closed("`strategy.placement()`")
        return self._host.extended.ledger.placement()

    def load_report(self) -> LoadReport:
        """Return the traffic of every ps in the running or last `fit`; prints as a table.

        Traffic is the rows and bytes that a ps sends and receives per second.
        """
        return self._host.traffic_meter.report()

    def status(self) -> RunStatus:
        """Return the status of workers, ps, tables and the coordinator; prints as tables.

        Thread: any. You may call it before, during and after `fit`, after the loss of a ps, and
        after the cluster was closed. It takes some milliseconds, and up to two seconds if a ps does
        not answer.

        Raises:
            KeraspsError: this process was forked from the one that is connected to the cluster.
        """
        check_not_forked()
        return self._status_reader.read()


class BaseStrategy(_Reports, tf.distribute.ParameterServerStrategy):
    """A strategy that keeps variables on ps tasks.

    The constructor of each strategy checks its arguments and calls `_set_up` with its host. The
    host implements what differs between strategies.
    """

    _connecting = threading.Lock()

    def __new__(cls, *args: object, **kwargs: object) -> BaseStrategy:
        # The constructor runs next, and checks that it is for the same cluster.
        current = connected_strategy()
        return current if type(current) is cls else super().__new__(cls)

    def _set_up(
        self, host: BaseHost, cluster_resolver: ClusterResolver, connect_timeout: float | None
    ) -> None:
        """Connect, or check that the call asks for the strategy that this process already has."""
        with BaseStrategy._connecting:
            current = connected_strategy()
            if current is not None:
                check_not_closed("a further strategy")
                current._check_is_wanted(self, host)
                return
            self._host = host
            self._local_cluster = local_cluster_of(host.connects_to)
            if self._local_cluster is not None:
                self._local_cluster.check_open()
            # Check for missing private names before connecting or patching anything.
            missing = patch.check_patched(table.PATCHES)
            _compat.warn_of_untested_versions()
            host.wait_for_tasks(connect_timeout)
            with without_info():
                self._connect(cluster_resolver)
            remember_connected(self)
            patch.install(table.PATCHES, missing)
            tell_connected(elsewhere=self._local_cluster is not None)

    def _check_is_wanted(self, other: object, host: BaseHost) -> None:
        """Check that a further call of the constructor asks for this strategy."""
        if host.connects_to.jobs != self._host.connects_to.jobs or other is not self:
            raise KeraspsError(
                "This process is connected to a cluster already, and TensorFlow connects a "
                "process once. Expected: the cluster of its first ParameterServerStrategy, "
                f"{_tasks(self._host.connects_to)}. Received: {_tasks(host.connects_to)}. Go on "
                "with the first strategy and its cluster: in a notebook, make the cluster in a "
                "separate cell that runs once. For another cluster, restart the kernel or start "
                "another process."
            )
        host.options.check_alike(self._host.options)

    def _connect(self, cluster_resolver: ClusterResolver) -> None:
        """Connect to the cluster, and replace TensorFlow's placement of variables with ours.

        Call once all tasks accept connections.
        """
        host = self._host
        self._has_left = False
        if self._local_cluster is not None:
            # Registered first, so that it also runs if a later line fails.
            self._local_cluster.before_close(self._disconnect)
        partitioner = host.options.variable_partitioner
        for_num_ps = getattr(partitioner, "for_num_ps", None)
        if for_num_ps is not None:
            partitioner = for_num_ps(host.num_ps)
        self._protocol = getattr(cluster_resolver, "rpc_layer", None)
        super().__init__(cluster_resolver, partitioner)
        theirs: Any = self._extended
        self._extended: Extended = host.make_extended(self, cluster_resolver, partitioner)
        # TensorFlow's constructor sets this, and a `tf.function` called in the scope reads it.
        self._extended._retrace_functions_for_each_device = (
            theirs._retrace_functions_for_each_device
        )
        as_training_needs_it: Host = host
        self._extended.host = as_training_needs_it
        host.begin()
        take_note_of_forks()
        self._status_reader = StatusReader(host, self._local_cluster)
        host.run_meter.after_fit = self._status_reader.advise
        self._status_socket = StatusSocket(
            lambda: described(repr(self), self.status(), self.description.jobs)
        )
        self._status_socket.start()
        atexit.register(self._before_tasks_end, None)
        if self._local_cluster is not None:
            self._local_cluster.before_close(self._before_tasks_end, self._note_closing)
            self._local_cluster.end_with_process()

    def _connect_to_cluster(self, coordinator_name: str) -> None:
        # TensorFlow's constructor calls this. TensorFlow's method would rename this process's
        # devices.
        self._num_workers = len(self._host.description.jobs["worker"])
        self._num_ps = self._host.num_ps
        self._host.connect(self._protocol)

    def _note_closing(self, closed_by: str) -> None:
        """Note that the cluster is closing: later errors are reported with that cause."""
        note_closed(closed_by)
        self._host.note_closing()

    def _before_tasks_end(self, closed_by: str | None) -> None:
        """Leave the cluster, once.

        Args:
            closed_by: the call that closes it, and its place; None if this process ends and did
                not start the tasks.
        """
        self._status_socket.close()
        self._status_reader.finish()
        if closed_by is None:
            leave_remote_functions()
        if self._has_left:
            return
        self._has_left = True
        if closed_by is None:
            self._host.leave_cluster()
        else:
            self._host.close(functools.partial(self._disconnect, closed_by))

    def _disconnect(self, closed_by: str) -> None:
        """Make this process forget the tasks, unless the process is ending."""
        if self._local_cluster is not None and self._local_cluster.process_ends:
            # TensorFlow would log for each function on the tasks that it cannot release it.
            leave_remote_functions()
        else:
            disconnect(self._host.connects_to.server_addresses)

    def scope(self) -> Any:
        """Return a context manager: models and variables made in it are on the cluster.

        Raises:
            ClusterClosedError: the cluster was closed.
        """
        check_not_closed("`strategy.scope()`")
        return super().scope()

    @property
    def description(self) -> ClusterDescription:
        """The cluster: the addresses of its tasks, by job."""
        return self._host.description

    @property
    def num_workers(self) -> int:
        """The number of tasks that do steps, lost ones included."""
        return self._host.num_workers

    @property
    def num_ps(self) -> int:
        """The number of ps tasks."""
        return self._host.num_ps

    @property
    def options(self) -> StrategyOptions:
        """The arguments of the constructor, such as `options.update_mode`."""
        return self._host.options

    def experimental_distribute_dataset(
        self, dataset: tf.data.Dataset, options: tf.distribute.InputOptions | None = None
    ) -> Any:
        """Return a dataset for `coordinator.create_per_worker_dataset`, as TensorFlow documents it.

        It is not tuned by tf.data unless its options say `autotune.enabled = True`.

        Args:
            dataset: the `tf.data.Dataset`.
            options: a `tf.distribute.InputOptions`.
        """
        return super().experimental_distribute_dataset(quickly_deleted(dataset), options)

    def distribute_datasets_from_function(
        self,
        dataset_fn: Callable[..., tf.data.Dataset],
        options: tf.distribute.InputOptions | None = None,
    ) -> Any:
        """Return a dataset for `coordinator.create_per_worker_dataset`, as TensorFlow documents it.

        It is not tuned by tf.data unless its options say `autotune.enabled = True`.

        Args:
            dataset_fn: given a `tf.distribute.InputContext`, returns a `tf.data.Dataset`.
            options: a `tf.distribute.InputOptions`.
        """
        return super().distribute_datasets_from_function(makes_quickly_deleted(dataset_fn), options)


def _tasks(description: ClusterDescription) -> str:
    return "; ".join(
        f"{job} at {', '.join(addresses)}" for job, addresses in description.jobs.items()
    )
