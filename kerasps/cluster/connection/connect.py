"""Makes this process the coordinator of a cluster, and keeps the objects that it made before.

TensorFlow's connect renames the devices of this process from `/job:localhost` to `/job:chief`. All
earlier variables, iterators and compiled functions are then lost: their device is unknown. Here the
coordinator's job is called `localhost`, like the devices, and it connects in two steps. First this
process starts its server, with the options that TensorFlow runs with already. So TensorFlow keeps
its devices and all objects on them. Then it adds the workers and ps, and TensorFlow sends them the
existing functions.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import tensorflow as tf

from kerasps import _compat
from kerasps.cluster.connection.earlier_resources import EarlierResources
from kerasps.cluster.description.cluster_description import ClusterDescription
from kerasps.cluster.serving.bind import listening_on
from kerasps.cluster.serving.listen_address import coordinator_listen_address
from kerasps.cluster.serving.ping_limit import without_ping_limit
from kerasps.cluster.serving.ports import check_port, no_server
from kerasps.errors import TaskUnreachableError
from kerasps.runtime.addresses import split_address
from kerasps.runtime.devices import COORDINATOR_JOB
from kerasps.runtime.grpc_options import hang_limit, set_grpc_options
from kerasps.runtime.inbox import Inbox
from kerasps.runtime.probe import Answer, ask_servers, limits_pings

# As many as TensorFlow's strategy, or more up to the hang limit; a task that is restarted takes a
# second or two.
_ATTEMPTS = 4
_PAUSE_S = 1.0
# Tasks delete the objects of this process when they have not heard from it for so long.
# TensorFlow's default is ten minutes, less than a laptop may be suspended. A killed process is
# detected by other means (`renewal`).
_KEEP_ALIVE_S = 24 * 3600
# So many workers may join before the filters no longer cover them. After that, workers connect to
# each other; the only harm is a pause when one is lost.
_MAX_JOINING = 256
# So many servers are asked at a time how many pings they accept.
_MAX_PROBES = 32

# The address at which this process serves. TensorFlow cannot stop a server, so the server of a
# failed attempt is used again.
_serving_at: str | None = None


def connect_to_tasks(
    cluster: ClusterDescription,
    *,
    protocol: str | None = None,
    own_task: tuple[str, int] = ("chief", 0),
) -> None:
    """Make this process the coordinator of a cluster.

    Call when all tasks accept connections. After an error the process may try again.
    """
    global _has_left
    context = _compat.eager_context()
    _has_left = False
    # TensorFlow's strategy sets these too: one request to a worker at a time, and no executor that
    # hides an error.
    os.environ["TF_ENABLE_EAGER_CLIENT_STREAMING_ENQUEUE"] = "False"
    os.environ["TF_PS_DISABLE_ASYNC_EXECUTOR_GLOBALLY"] = "True"
    # Send a tensor of one element in the request of the call that uses it. TensorFlow waits for the
    # arrival of other tensors, for ever if it reconnects a worker meanwhile.
    os.environ["TF_SEND_AS_PROTOS_WHEN_POSSIBLE"] = "True"
    set_grpc_options()
    is_fresh = context._context_handle is None
    if is_fresh and cluster.is_on_one_machine:
        _sleep_when_idle(context)
    context.ensure_initialized()
    config = context.config
    coordinator = {COORDINATOR_JOB: cluster.jobs["chief"]}
    if _serving_at != cluster.jobs["chief"][0]:
        resources = None if is_fresh else EarlierResources.find()
        listens_on = coordinator_listen_address(cluster)
        server_def = _server_def(coordinator, config, protocol)
        _set_device_filters(server_def, cluster)
        _start_own_server(context, server_def, listens_on, own_task)
        if resources is not None:
            resources.restore()
    if cluster.is_on_one_machine:
        config.experimental.disable_thread_spinning = True
    # The second step. The tasks get this process's options, including the one set just now.
    set_grpc_options(servers_limit_pings=_limit_pings(cluster))
    others = {job: tasks for job, tasks in cluster.jobs.items() if job != "chief"}
    _add_tasks(context, _server_def({**coordinator, **others}, config, protocol), cluster)


def _limit_pings(cluster: ClusterDescription) -> bool:
    """Return whether a server of the cluster limits pings, since kerasps did not start it."""
    addresses = cluster.server_addresses.values()
    with ThreadPoolExecutor(_MAX_PROBES) as pool:
        return any(pool.map(lambda address: limits_pings(address, hang_limit()), addresses))


# Held while the set of tasks changes, and while a function is registered with the tasks. During the
# change TensorFlow has forgotten a task for some milliseconds, in which a registration would fail.
tasks_lock = threading.RLock()

# True once this process has forgotten its tasks: then a thread must not reconnect one.
_has_left = False


def update_tasks(members: Mapping[tuple[str, int], str]) -> None:
    """Make these the only workers and ps that this process knows.

    Call when it is connected. A task that is removed, or was restarted, loses all objects of this
    process. TensorFlow waits for each member, so pass only those that answer.

    Raises:
        tf.errors.OpError: a member did not answer.
    """
    with tasks_lock:
        if _has_left:
            return
        context = _compat.eager_context()
        before = context.get_server_def()
        jobs: dict[str, dict[int, str]] = {
            job.name: dict(job.tasks) for job in before.cluster.job if job.name == COORDINATOR_JOB
        }
        for (job, index), address in sorted(members.items()):
            jobs.setdefault(job, {})[index] = address
        server_def = _server_def(jobs, before.default_session_config, before.protocol)
        try:
            context.update_server_def(server_def, keep_alive_secs=_KEEP_ALIVE_S)
        except BaseException:
            context._server_def = before
            raise


def known_tasks() -> set[str]:
    """Return the `"host:port"` of each worker and ps that this process knows."""
    server_def = _compat.eager_context().get_server_def()
    jobs = [] if server_def is None else server_def.cluster.job
    return {a for job in jobs if job.name != COORDINATOR_JOB for a in job.tasks.values()}


def forget_tasks() -> None:
    """Make this process forget all workers and ps, until it connects again.

    TensorFlow ends its context on each of them, and waits for the answer.
    """
    global _has_left
    with tasks_lock:
        try:
            with contextlib.suppress(tf.errors.OpError):
                update_tasks({})
        finally:
            _has_left = True


def _sleep_when_idle(context: Any) -> None:
    # An idle thread of TensorFlow spins for a while before it sleeps. If tasks share the cores of
    # one machine, this takes time from the others: a sixth of a small step's time. A process that
    # has used TensorFlow before cannot change its own threads; the tasks get the option when they
    # are added.
    config = tf.compat.v1.ConfigProto()
    if context._config is not None:
        config.CopyFrom(context._config)
    config.experimental.disable_thread_spinning = True
    context._config = config


def _server_def(
    jobs: Mapping[str, Mapping[int, str] | Sequence[str]],
    config: tf.compat.v1.ConfigProto,
    protocol: str | None,
) -> tf.train.ServerDef:
    by_index = {
        job: dict(tasks) if isinstance(tasks, Mapping) else dict(enumerate(tasks))
        for job, tasks in jobs.items()
    }
    return tf.train.ServerDef(
        cluster=tf.train.ClusterSpec(by_index).as_cluster_def(),
        job_name=COORDINATOR_JOB,
        task_index=0,
        protocol=protocol or "grpc",
        default_session_config=config,
    )


def _set_device_filters(server_def: tf.train.ServerDef, cluster: ClusterDescription) -> None:
    """Limit the connections of tasks: workers connect to ps, and ps to workers.

    Then a lost task stops no other task of its type. Also, a task is updated only when a task that
    it connects to changes. After an update it forgets its prepared functions, and a worker needs a
    third of a second or more to prepare its step again. TensorFlow accepts filters with the first
    server definition only, also for tasks that do not exist yet.
    """
    spare = {"worker": _MAX_JOINING, "ps": 0}
    for job, seen in (("worker", "ps"), ("ps", "worker")):
        filters = server_def.cluster_device_filters.jobs.add(name=job)
        for index in range(len(cluster.jobs.get(job, ())) + spare[job]):
            filters.tasks[index].device_filters.extend([f"/job:{seen}", f"/job:{COORDINATOR_JOB}"])


def _start_own_server(
    context: Any,
    server_def: tf.train.ServerDef,
    listens_on: str | None,
    own_task: tuple[str, int],
) -> None:
    global _serving_at
    address = server_def.cluster.job[0].tasks[0]
    check_port(address, listens_on, own_task)
    try:
        with (
            without_ping_limit(),
            listening_on(listens_on, split_address(address)[1]),
        ):
            context.set_server_def(server_def, keep_alive_secs=_KEEP_ALIVE_S)
    except tf.errors.OpError as exc:
        # TensorFlow has recorded a server that did not start, and would not try again.
        context._server_def = None
        raise no_server(address, exc.message, own_task) from exc
    _serving_at = address


def _add_tasks(context: Any, server_def: tf.train.ServerDef, cluster: ClusterDescription) -> None:
    before = context.get_server_def()
    deadline = time.monotonic() + hang_limit()
    for attempt in itertools.count(1):
        try:
            _wait_for_tasks(
                lambda: context.update_server_def(server_def, keep_alive_secs=_KEEP_ALIVE_S),
                cluster,
            )
            return
        except tf.errors.OpError as exc:
            context._server_def = before
            is_last = attempt >= _ATTEMPTS and time.monotonic() > deadline
            if is_last or not isinstance(exc, tf.errors.UnavailableError):
                raise TaskUnreachableError(
                    "TensorFlow could not set up the tasks of the cluster. Expected: a server of "
                    "this version of TensorFlow, and of this cluster, at the address of each "
                    f"worker and ps. Received: {exc.message} Restart `kerasps serve` in the tasks, "
                    "and make the strategy again."
                ) from exc
        except BaseException:
            context._server_def = before
            raise
        time.sleep(_PAUSE_S)


def _wait_for_tasks(update: Callable[[], None], cluster: ClusterDescription) -> None:
    """Run `update`, in which TensorFlow waits for each task without a time limit."""
    ended: Inbox[BaseException | None] = Inbox()

    def run() -> None:
        try:
            update()
        except BaseException as exc:
            ended.put(exc)
        else:
            ended.put(None)

    threading.Thread(target=run, name="kerasps-connect", daemon=True).start()
    addresses, limit = cluster.server_addresses, hang_limit()
    answered_at = dict.fromkeys(addresses, time.monotonic())
    while True:
        with contextlib.suppress(queue.Empty):
            error = ended.get(timeout=_PAUSE_S)
            if error is not None:
                raise error
            return
        answers = ask_servers(addresses, _PAUSE_S)
        now = time.monotonic()
        answered_at.update({t: now for t, a in answers.items() if a is Answer.SERVES})
        silent = [task for task in addresses if now - answered_at[task] > limit]
        if silent:
            names = ", ".join(
                f"{job} {index} at {addresses[job, index]} ({answers[job, index].value})"
                for job, index in silent
            )
            raise TaskUnreachableError(
                "Tasks stopped answering while TensorFlow connected to them. Expected: a server "
                f"that answers at each address. Received: {names}. Restart `kerasps serve` in "
                "these tasks, and make the strategy again."
            )
