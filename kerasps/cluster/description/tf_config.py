"""Reads TF_CONFIG, the environment variable that describes a cluster, as schedulers write it."""

from __future__ import annotations

import json
import os
from typing import Any

from kerasps.cluster.description.checking import checked_cluster, reject
from kerasps.cluster.description.cluster_description import ClusterDescription
from kerasps.cluster.description.forms import (
    is_sparse,
    named_as_here,
    with_names_of_here,
    with_worker_as_chief,
    without_gaps_left_out,
)
from kerasps.errors import ClusterConfigError
from kerasps.runtime.addresses import MAX_DIGITS

_EXAMPLE = (
    '{"cluster": {"chief": ["host0:2222"], "worker": ["host1:2222"], "ps": ["host2:2222"]}, '
    '"task": {"type": "chief", "index": 0}}'
)


# Names the worker that is the chief, if TF_CONFIG lists no chief.
CHIEF_VARIABLE = "KERASPS_CHIEF"


def read_tf_config(
    text: str | None = None, *, needs_chief: bool = True, may_be_sparse: bool = False
) -> ClusterDescription:
    """Read TF_CONFIG and check it.

    If it lists no chief, the environment variable KERASPS_CHIEF may name the worker that is the
    chief: `"worker:0"`. It must be the same in all tasks.

    Args:
        text: the JSON text. None (default) reads the environment variable TF_CONFIG.
        needs_chief: whether there must be a chief. None is needed if each worker drives its own
            steps.
        may_be_sparse: whether it may leave out the addresses of other tasks, as TFJob does for
            dynamic workers. Default False: a chief must know all.

    Raises:
        ClusterConfigError: the text is not JSON, or describes no cluster that parameter-server
            training can use.
    """
    config = _content(text)
    task = _task_of(config)
    cluster = with_names_of_here(config.get("cluster"), source="TF_CONFIG")
    task_type, index = named_as_here(task["type"]), task.get("index", 0)
    if isinstance(index, str) and index.isdecimal() and len(index) < MAX_DIGITS:
        # Schedulers insert the index from an environment variable, which leaves it in quotes;
        # TensorFlow accepts that too.
        index = int(index)
    may_be_sparse = may_be_sparse and is_sparse(cluster)
    chief = os.environ.get(CHIEF_VARIABLE)
    if may_be_sparse:
        cluster = without_gaps_left_out(cluster, task_type, index, source="TF_CONFIG")
        needs_chief = False
    elif chief:
        cluster, task_type, index = with_worker_as_chief(cluster, task_type, index, chief)
    description = checked_cluster(
        cluster,
        task_type,
        index,
        source="TF_CONFIG",
        needs_chief=needs_chief,
        may_be_sparse=may_be_sparse,
    )
    num_tasks = len(description.jobs.get(description.task_type, ()))
    if "index" not in task and num_tasks > 1:
        expected = (
            f'an "index" from 0 to {num_tasks - 1} in "task", since {num_tasks} '
            f"{description.task_type} tasks are listed"
        )
        reject("TF_CONFIG does not say which of several tasks this is", expected, task)
    return description


def _task_of(config: dict[str, object]) -> dict[str, Any]:
    """Return the entry of this task."""
    cluster, task = config.get("cluster"), config.get("task")
    is_chief = isinstance(task, dict) and task.get("type") in ("chief", "master")
    is_empty = isinstance(cluster, dict) and not any(cluster.values())
    if is_chief and is_empty and "cluster" in config:
        reject(
            "The cluster in TF_CONFIG has no tasks",
            "all chief, worker and ps tasks, since this is the chief",
            cluster,
            advice="TFJob writes this if `enableDynamicWorker: true` is set: remove that setting, "
            "or give the chief a TF_CONFIG that lists all tasks. ",
        )
    if not cluster:
        reject(
            "TF_CONFIG has no cluster",
            'a "cluster" entry that lists the addresses of chief, worker and ps tasks',
            config,
        )
    if not isinstance(task, dict) or "type" not in task:
        reject(
            "TF_CONFIG does not say which task this is",
            'a "task" entry like {"type": "chief", "index": 0}',
            task,
        )
    if config.get("rpc_layer") not in (None, "grpc"):
        reject(
            "The rpc_layer in TF_CONFIG is not supported",
            '"grpc", or no such entry',
            repr(config["rpc_layer"]),
        )
    return task


def _content(text: str | None) -> dict[str, Any]:
    """Return the object in the JSON text of TF_CONFIG; None takes the environment variable's."""
    if text is None:
        text = os.environ.get("TF_CONFIG", "")
        if not text.strip():
            raise ClusterConfigError(
                f"TF_CONFIG is not set. Expected: a description of the cluster like {_EXAMPLE}. "
                "Received: TF_CONFIG unset or empty. Start the script with `kerasps launch`, use "
                "`kerasps.LocalCluster`, or set TF_CONFIG in every task."
            )
    try:
        config = json.loads(text, object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as exc:
        raise ClusterConfigError(
            f"TF_CONFIG is not JSON: {exc}. Expected: text like {_EXAMPLE}. Received: {text!r}. "
            "Correct the text; in a shell, put it in single quotes."
        ) from exc
    if not isinstance(config, dict):
        reject("TF_CONFIG is not a JSON object", f"an object like {_EXAMPLE}", config)
    return config


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # JSON keeps the last of several entries with one name, and drops the tasks in the others.
    entries = dict(pairs)
    if len(entries) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        reject("TF_CONFIG has an entry twice", "each name once in an object", json.dumps(twice))
    return entries
