"""Reads the cluster from the cluster resolver that a strategy is given.

Raises for any other object, with advice: a dictionary, an address, a class instead of an object. If
a cluster names no chief, this process becomes its chief.
"""

from __future__ import annotations

import atexit
import functools
import socket
from collections.abc import Mapping
from typing import Any

from kerasps.cluster.description.checking import checked_cluster, checked_jobs, reject
from kerasps.cluster.description.cluster_description import (
    ClusterDescription,
    is_loopback,
    require_chief,
)
from kerasps.cluster.description.forms import named_as_here, with_names_of_here
from kerasps.cluster.description.protocol import ClusterResolver
from kerasps.cluster.description.tf_config import read_tf_config
from kerasps.cluster.local.local_cluster import LocalCluster
from kerasps.errors import ClusterConfigError
from kerasps.runtime.addresses import split_address

_RECIPE = (
    "`tf.distribute.cluster_resolver.SimpleClusterResolver(tf.train.ClusterSpec({...}), "
    'task_type="chief", task_id=0, rpc_layer="grpc")`'
)
# TensorFlow's resolver that reads the variable, without an error that names its mistakes.
_OF_TF_CONFIG = "TFConfigClusterResolver"
_LOOPBACK = "127.0.0.1"


def as_resolver(given: Any) -> ClusterResolver:
    """Return the cluster resolver that was passed to a strategy."""
    if isinstance(given, LocalCluster):
        resolver: ClusterResolver = given.cluster_resolver
        return resolver
    # The class of a resolver has the same methods, so check for classes first.
    if isinstance(given, type) or not callable(getattr(given, "cluster_spec", None)):
        shown = repr(given)
        raise ClusterConfigError(
            "Argument `cluster_resolver` is not a cluster resolver. Expected: a "
            "`tf.distribute.cluster_resolver.ClusterResolver`, a `kerasps.LocalCluster`, or "
            "nothing, if TF_CONFIG describes the cluster. Received: cluster_resolver="
            f"{shown if len(shown) < 500 else shown[:500] + '…'} of type {type(given).__name__}. "
            f"{_advice_on(given)}"
        )
    found: ClusterResolver = given
    return found


def _advice_on(given: object) -> str:
    """Return advice for a user who passed this object as a cluster resolver."""
    if isinstance(given, type):
        return f"Make an object of it: `{given.__name__}(...)`."
    if isinstance(given, Mapping) and "cluster" in given:
        return "Set the environment variable instead: `os.environ['TF_CONFIG'] = json.dumps(...)`."
    if isinstance(given, Mapping):
        return f"Make a resolver of the dictionary: {_RECIPE}."
    if isinstance(given, ClusterDescription) or hasattr(given, "as_cluster_def"):
        return f"Make a resolver of its tasks: {_RECIPE}."
    if isinstance(given, str):
        return (
            "One address does not say which tasks there are. List the tasks of each job, without "
            f'"grpc://": {_RECIPE}.'
        )
    if callable(given):
        return "A partitioner is the second argument: `variable_partitioner=`."
    return f"Make one: {_RECIPE}."


def check_cluster_resolver(resolver: ClusterResolver) -> ClusterDescription:
    """Check the cluster of any cluster resolver, as `read_tf_config` checks TF_CONFIG.

    If a cluster lists no chief, as in TensorFlow's guides, this process becomes its chief, at a
    free port of this machine. The port stays the same for as long as the process lives.
    """
    name, cluster = type(resolver).__name__, _cluster_of(resolver)
    if not cluster.get("chief") and _task_type_of(resolver) == "chief":
        others = {job: tasks for job, tasks in cluster.items() if job != "chief"}
        jobs = checked_jobs(others, source=name, needs_chief=False)
        cluster = {**others, "chief": [_chief_address(jobs["worker"], jobs["ps"])]}
    return require_chief(_described(resolver, cluster), source=name)


def describe_resolver(resolver: ClusterResolver) -> ClusterDescription:
    """Return the cluster that a resolver describes, possibly without a chief."""
    return _described(resolver, _cluster_of(resolver))


def _cluster_of(resolver: ClusterResolver) -> dict[str, Any]:
    """Return the addresses of a resolver's tasks, by job."""
    name = type(resolver).__name__
    try:
        spec = resolver.cluster_spec()
    except ValueError:
        if name == _OF_TF_CONFIG:
            read_tf_config()  # raises an error that names the mistake
        raise
    cluster = spec.as_dict() if spec is not None and hasattr(spec, "as_dict") else None
    if not cluster:
        if name == _OF_TF_CONFIG:
            read_tf_config()
        expected = "a cluster with chief, worker and ps tasks"
        reject(f"The cluster resolver {name} gives no cluster", expected, cluster, source=name)
    protocol = getattr(resolver, "rpc_layer", None)
    if protocol not in (None, "grpc"):
        expected = 'rpc_layer="grpc", or None'
        received = f"rpc_layer={protocol!r}"
        reject(f"The rpc_layer of {name} is not supported", expected, received, source=name)
    jobs: dict[str, Any] = with_names_of_here(cluster, source=name)
    return jobs


def _described(resolver: ClusterResolver, cluster: Mapping[str, object]) -> ClusterDescription:
    index = getattr(resolver, "task_id", None)
    return checked_cluster(
        cluster,
        _task_type_of(resolver),
        0 if index is None else index,
        source=type(resolver).__name__,
        needs_chief=False,
    )


def _task_type_of(resolver: ClusterResolver) -> Any:
    # Kubernetes and Slurm resolvers have no entry for the chief: by TensorFlow's convention, unset
    # means the coordinator.
    return named_as_here(getattr(resolver, "task_type", None)) or "chief"


@functools.cache
def _chief_address(workers: tuple[str, ...], ps: tuple[str, ...]) -> str:
    """Return a free `"host:port"` of this machine, which the tasks can reach.

    It is the same each time: a process that makes its strategy again means the same cluster.
    """
    host = _host_towards([*workers, *ps])
    # TensorFlow's server sets this option too, and can use the port of a socket that never listens.
    # The socket stays bound, so the system gives the port to no other process meanwhile.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    holder = socket.socket(family, socket.SOCK_STREAM)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind((host, 0))
    atexit.register(holder.close)
    port = holder.getsockname()[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _host_towards(addresses: list[str]) -> str:
    """Return the IP address of this machine from which it reaches the first remote task.

    Return that of the loopback if no task is remote, or if no remote name can be resolved.
    """
    for host, port in map(split_address, addresses):
        if is_loopback(host):
            continue
        try:
            family, kind, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
            # This sends nothing: the kernel only finds the route.
            with socket.socket(family, kind) as probe:
                probe.connect(place)
                return str(probe.getsockname()[0])
        except (OSError, UnicodeError):
            continue
    return _LOOPBACK
