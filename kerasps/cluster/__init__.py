"""Describes, starts, reaches and ends the processes of a cluster, and translates their errors.

Contract: everything here speaks of tasks (chief, worker, ps) by job and index, and knows nothing of
models. A task's server imports this wing, so the wing imports its modules when a name is first
used. A server that starts without TensorFlow's Python packages is ready in half a second.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kerasps._doors import opened_when_used

if TYPE_CHECKING:
    from kerasps.cluster.calls import apart, call_apart, call_flat, persist
    from kerasps.cluster.cluster_resolver import (
        as_resolver,
        check_cluster_resolver,
        describe_resolver,
    )
    from kerasps.cluster.connected import (
        check_not_closed,
        closed_error,
        connected_strategy,
        note_closed,
        remember_connected,
    )
    from kerasps.cluster.connection import connect_to_tasks, tasks_lock
    from kerasps.cluster.description import (
        EVALUATOR,
        ClusterDescription,
        read_tf_config,
        require_chief,
    )
    from kerasps.cluster.devices import COORDINATOR_CPU, COORDINATOR_TASK, ps_device, ps_index
    from kerasps.cluster.disconnection import disconnect
    from kerasps.cluster.fetching import fetch, sent
    from kerasps.cluster.forks import check_not_forked, is_fork, take_note_of_forks
    from kerasps.cluster.graph_optimizer import GraphOptimizer, optimizing
    from kerasps.cluster.listeners import processes_listening_on
    from kerasps.cluster.local import LocalCluster, task_watch_of
    from kerasps.cluster.local_ps import LocalPS
    from kerasps.cluster.local_registry import local_cluster_of
    from kerasps.cluster.logs import open_log
    from kerasps.cluster.membership import Membership, WorkerInfo
    from kerasps.cluster.process import (
        TaskProcess,
        child_environment,
        describe_exit_code,
        end_with_parent,
    )
    from kerasps.cluster.protocol import ClusterResolver
    from kerasps.cluster.reachability import unreachable, wait_until_reachable
    from kerasps.cluster.renewal import AfterTheEnd, start_anew
    from kerasps.cluster.resolver import LocalClusterResolver
    from kerasps.cluster.restarts import DEFAULT_MAX_RESTARTS, Restart, RestartBudget
    from kerasps.cluster.server import serve
    from kerasps.cluster.supervision import Notice, SupervisorPipe, tell_supervisor
    from kerasps.cluster.task_watch import Death
    from kerasps.cluster.tf_errors import (
        OUT_OF_RANGE,
        absent_ps_error,
        answers,
        check_ps_of,
        cleaned,
        comes_from,
        comes_from_worker,
        lost_ps,
        naming_closed,
        naming_lost_ps,
        ps_is_there,
        translated_errors,
    )
    from kerasps.cluster.tf_info import without_info
    from kerasps.cluster.worker_devices import (
        FIRST_CPU,
        WorkerDevices,
        checked_device_names,
        compute_devices,
        devices_of_task,
    )

__all__ = [
    "COORDINATOR_CPU",
    "COORDINATOR_TASK",
    "DEFAULT_MAX_RESTARTS",
    "EVALUATOR",
    "FIRST_CPU",
    "OUT_OF_RANGE",
    "AfterTheEnd",
    "ClusterDescription",
    "ClusterResolver",
    "Death",
    "GraphOptimizer",
    "LocalCluster",
    "LocalClusterResolver",
    "LocalPS",
    "Membership",
    "Notice",
    "Restart",
    "RestartBudget",
    "SupervisorPipe",
    "TaskProcess",
    "WorkerDevices",
    "WorkerInfo",
    "absent_ps_error",
    "answers",
    "apart",
    "as_resolver",
    "call_apart",
    "call_flat",
    "check_cluster_resolver",
    "check_not_closed",
    "check_not_forked",
    "check_ps_of",
    "checked_device_names",
    "child_environment",
    "cleaned",
    "closed_error",
    "comes_from",
    "comes_from_worker",
    "compute_devices",
    "connect_to_tasks",
    "connected_strategy",
    "describe_exit_code",
    "describe_resolver",
    "devices_of_task",
    "disconnect",
    "end_with_parent",
    "fetch",
    "is_fork",
    "local_cluster_of",
    "lost_ps",
    "naming_closed",
    "naming_lost_ps",
    "note_closed",
    "open_log",
    "optimizing",
    "persist",
    "processes_listening_on",
    "ps_device",
    "ps_index",
    "ps_is_there",
    "read_tf_config",
    "remember_connected",
    "require_chief",
    "sent",
    "serve",
    "start_anew",
    "take_note_of_forks",
    "task_watch_of",
    "tasks_lock",
    "tell_supervisor",
    "translated_errors",
    "unreachable",
    "wait_until_reachable",
    "without_info",
]

if not TYPE_CHECKING:  # to which it would make every name a valid one
    __getattr__ = opened_when_used(
        __name__,
        {
            "check_not_closed": "connected",
            "closed_error": "connected",
            "disconnect": "disconnection",
            "local_cluster_of": "local_registry",
            "note_closed": "connected",
            "naming_closed": "tf_errors",
            "without_info": "tf_info",
            "ps_is_there": "tf_errors",
            "AfterTheEnd": "renewal",
            "COORDINATOR_CPU": "devices",
            "COORDINATOR_TASK": "devices",
            "FIRST_CPU": "worker_devices",
            "compute_devices": "worker_devices",
            "devices_of_task": "worker_devices",
            "ClusterDescription": "description",
            "ClusterResolver": "protocol",
            "DEFAULT_MAX_RESTARTS": "restarts",
            "EVALUATOR": "description",
            "Death": "task_watch",
            "GraphOptimizer": "graph_optimizer",
            "LocalCluster": "local",
            "LocalClusterResolver": "resolver",
            "LocalPS": "local_ps",
            "Membership": "membership",
            "OUT_OF_RANGE": "tf_errors",
            "Notice": "supervision",
            "Restart": "restarts",
            "RestartBudget": "restarts",
            "SupervisorPipe": "supervision",
            "TaskProcess": "process",
            "WorkerDevices": "worker_devices",
            "WorkerInfo": "membership",
            "absent_ps_error": "tf_errors",
            "answers": "tf_errors",
            "apart": "calls",
            "as_resolver": "cluster_resolver",
            "call_apart": "calls",
            "call_flat": "calls",
            "persist": "calls",
            "check_cluster_resolver": "cluster_resolver",
            "check_not_forked": "forks",
            "check_ps_of": "tf_errors",
            "checked_device_names": "worker_devices",
            "child_environment": "process",
            "cleaned": "tf_errors",
            "comes_from": "tf_errors",
            "comes_from_worker": "tf_errors",
            "connect_to_tasks": "connection",
            "tasks_lock": "connection",
            "connected_strategy": "connected",
            "describe_exit_code": "process",
            "describe_resolver": "cluster_resolver",
            "end_with_parent": "process",
            "fetch": "fetching",
            "is_fork": "forks",
            "lost_ps": "tf_errors",
            "naming_lost_ps": "tf_errors",
            "open_log": "logs",
            "optimizing": "graph_optimizer",
            "processes_listening_on": "listeners",
            "ps_device": "devices",
            "ps_index": "devices",
            "read_tf_config": "description",
            "remember_connected": "connected",
            "require_chief": "description",
            "sent": "fetching",
            "serve": "server",
            "start_anew": "renewal",
            "take_note_of_forks": "forks",
            "tell_supervisor": "supervision",
            "task_watch_of": "local",
            "translated_errors": "tf_errors",
            "unreachable": "reachability",
            "wait_until_reachable": "reachability",
        },
    )
