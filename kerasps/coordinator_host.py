"""The host of a strategy whose process is the coordinator: watches workers, sends them steps."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, Unpack

import tensorflow as tf

from kerasps.base_host import BaseHost
from kerasps.cluster.connection.connect import connect_to_tasks
from kerasps.cluster.description.cluster_description import ClusterDescription
from kerasps.cluster.description.protocol import ClusterResolver
from kerasps.cluster.description.worker_devices import FIRST_CPU, WorkerDevices
from kerasps.cluster.members.membership import Membership, WorkerInfo
from kerasps.coordinator import Coordinator
from kerasps.dynamic import add_key_pools
from kerasps.inputs import Input, InputArguments, as_input
from kerasps.runtime.calls import wait_for_calls
from kerasps.step.running.replica_run import run_in_graph
from kerasps.strategy_arguments import Partitioner, StrategyOptions, wire_choices
from kerasps.training import Dispatching
from kerasps.training.calls.coordinator_port import CoordinatorPort
from kerasps.training.calls.scheduled import ScheduledCalls
from kerasps.training.contract.host import HostOfWorkers, LoopSteps
from kerasps.training.sessions.dispatcher import Dispatcher
from kerasps.variables.keras.stand_ins import StandIns
from kerasps.variables.lanes.flights import wait_for_flights
from kerasps.variables.placing.placing import Extended
from kerasps.variables.rows.row_pools import RowPools
from kerasps.variables.storage.wire import WireRule

# The wait for steps in flight when the cluster is closed. They fail at once, unless a worker is
# computing.
_LANDING_S = 2.0
# A call to a task that is silent ends within some 10 s, most of which are over by then.
_CALLS_S = 5.0


class CoordinatorHost(BaseHost, HostOfWorkers):
    """The host of a strategy whose process is the coordinator."""

    own_worker = None
    after_ps_loss = (
        "Start the ps again and this script with it, from the last checkpoint: "
        "`keras.callbacks.BackupAndRestore` resumes at the step of its last backup."
    )

    def __init__(
        self,
        description: ClusterDescription,
        options: StrategyOptions,
        cluster_resolver: ClusterResolver,
    ) -> None:
        super().__init__(description, description, options)
        self._devices = WorkerDevices(options.worker_devices)

        self._cluster_resolver = cluster_resolver

    def connect(self, protocol: str | None) -> None:
        """Connect this process to the tasks, as the coordinator, which does not compute."""
        # With visible GPUs, its TensorFlow would take their memory from a worker on this machine.
        # Once TensorFlow is initialised this fails: then the user's code uses the GPU and keeps it.
        with contextlib.suppress(RuntimeError):
            tf.config.set_visible_devices([], "GPU")
        connect_to_tasks(self.connects_to, protocol=protocol)

    def make_extended(
        self,
        strategy: tf.distribute.ParameterServerStrategy,
        cluster_resolver: ClusterResolver,
        variable_partitioner: Partitioner | None,
    ) -> Extended:
        """Return the object that places the strategy's variables."""
        options, self.strategy = self.options, strategy
        self.extended = Extended(
            strategy, cluster_resolver, variable_partitioner, options.shard_layout
        )
        if options.sparse_updates == "lazy":  # else tables are updated as a whole
            self.extended.row_pools = RowPools(options.table_min_bytes)
        add_key_pools(self.extended)
        self.extended.wire_rule = WireRule(wire_choices(options.wire_dtype))
        return self.extended

    def begin(self) -> None:
        """Start watching the tasks, and taking back lost workers that return.

        Raises ValueError if a worker lacks one of `worker_devices`.
        """
        self._devices.check(self.description.jobs.get("worker", ()))
        super().begin()
        self.membership = self.make_membership()
        self.membership.start()
        coordinator = self.coordinator
        self.scheduled_calls = calls = ScheduledCalls(self)
        self._port = CoordinatorPort(coordinator)
        self._port.take_over(self.membership, calls)
        self.extended.stand_ins = StandIns(self.extended.mutex)
        self.extended.replica_runner = functools.partial(run_in_graph, self, calls)

    def make_membership(self) -> Membership:
        """Return an object that watches the tasks once it is started."""
        return Membership(self.description.server_addresses, self._resolve)

    def _resolve(self) -> dict[int, str]:
        """Return the current addresses of the workers, by index."""
        workers = self._cluster_resolver.cluster_spec().as_dict().get("worker", {})
        return dict(workers) if isinstance(workers, dict) else dict(enumerate(workers))

    def leave_cluster(self) -> None:
        """Stop watching the tasks, since this process ends."""
        self.membership.stop()
        self.extended.key_pools.stop()
        wait_for_calls(_CALLS_S)

    def note_closing(self) -> None:
        """Stop watching the tasks, since they end on purpose."""
        self.membership.close()
        self.extended.key_pools.stop()

    def close(self, disconnect: Callable[[], None]) -> None:
        """End all calls to workers of this process, which continues without them."""
        # Before calls are cancelled: else TensorFlow would ask tasks to delete their results.
        disconnect()
        self._port.close()
        wait_for_flights(_LANDING_S)

    @property
    def coordinator(self) -> tf.distribute.coordinator.ClusterCoordinator:
        """The `ClusterCoordinator` of the strategy."""
        return Coordinator(self.strategy)

    def hangs(self, ps: int) -> bool:
        """Return True if a ps counts as lost because it does not answer."""
        return self.membership.hangs(ps)

    def worker_infos(self) -> list[WorkerInfo]:
        """Return the known state of each worker."""
        return self.membership.tasks("worker")

    def ps_infos(self) -> list[WorkerInfo]:
        """Return the known state of each ps."""
        return self.membership.tasks("ps")

    @property
    def num_workers(self) -> int:
        """The number of worker tasks, lost ones included."""
        return self.membership.num_workers

    @property
    def num_readers(self) -> int:
        """The number of tasks that read an input of `evaluate` or `predict`."""
        return self.num_workers

    @property
    def own_devices(self) -> tuple[str, ...]:
        """The device that computes in this process: the first CPU, since workers use the GPUs."""
        return (FIRST_CPU,)

    def devices_of(self, worker: int) -> tuple[str, ...]:
        """Return the short names of the devices that compute on a worker."""
        return self._devices.of(worker, self.num_workers)

    def devices_of_workers(self) -> list[tuple[str, ...]]:
        """Return the result of `devices_of` for each worker."""
        return self._devices.of_all(self.num_workers)

    def device_of_calls(self) -> tuple[str, bool]:
        """Return the device of scheduled functions, and True if all workers have it."""
        return self._devices.of_calls(self.num_workers)

    def begin_fit(
        self, data: object, callbacks: object, **arguments: Unpack[InputArguments]
    ) -> tuple[Input, Any]:
        """Return an input that all workers read, and the user's callbacks."""
        return as_input(data, self.num_workers, in_passes=True, **arguments), callbacks

    def dispatcher(self, steps: LoopSteps) -> Dispatching:
        """Return the object that sends the executions of a loop to the workers."""
        return Dispatcher(self, steps)
