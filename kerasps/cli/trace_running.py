"""Traces a training that runs, on all its tasks."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

from kerasps.cluster.description.cluster_description import ClusterDescription
from kerasps.cluster.description.tf_config import read_tf_config
from kerasps.errors import ClusterConfigError, TaskUnreachableError
from kerasps.tracing.recording import MAX_SECONDS, Recording
from kerasps.tracing.report import new_run, write_report

_PROC = Path("/proc")


def trace_running(log_dir: str, seconds: float, pid: int | None) -> int:
    """Record what the tasks of a running training do, write the files, and say what limits it.

    Args:
        log_dir: the directory for the files.
        seconds: how long to record.
        pid: a process of the training on this machine. None (default) takes the cluster in
            TF_CONFIG, else that of the only training on this machine.

    Returns:
        The exit code.

    Raises:
        ClusterConfigError: there is no training, or more than one.
        TaskUnreachableError: no task has answered.
    """
    if seconds > MAX_SECONDS:
        raise ClusterConfigError(
            f"The time is too long. Expected: {MAX_SECONDS:g} seconds at most. Received: "
            f"{seconds:g}. Record for a shorter time."
        )
    addresses = _cluster(pid).addresses
    directory = Path(log_dir)
    run = new_run(directory)
    recording = Recording(addresses, f"kerasps-{run}-{os.getpid()}")
    recording.start()
    try:
        time.sleep(seconds)
    finally:
        recording.stop()
    if not recording.contents:
        reasons = "; ".join(f"{job} {i}: {why}" for (job, i), why in recording.missing.items())
        raise TaskUnreachableError(
            "No task has recorded anything. Expected: a server of TensorFlow's at the address of "
            f"each task. Received: {reasons}. Start the training first."
        )
    report = write_report(directory, run, addresses, recording, None)
    print(report, flush=True)
    return 0


def _cluster(pid: int | None) -> ClusterDescription:
    if pid is None and os.environ.get("TF_CONFIG"):
        return read_tf_config(needs_chief=False)
    found: dict[str, ClusterDescription] = {}
    for own, description in _clusters_here():
        if pid is None or pid in (own, _parent_of(own)):
            found[str(description.jobs)] = description
    if len(found) == 1:
        return found.popitem()[1]
    where = "this machine" if pid is None else f"process {pid}"
    raise ClusterConfigError(
        f"It is not clear which training to trace. Expected: one training on {where}. Received: "
        f"{len(found) or 'none'}. Say which one it is by --pid, with the process id of its script "
        "or of one of its tasks, or set TF_CONFIG."
    )


def _clusters_here() -> Iterator[tuple[int, ClusterDescription]]:
    """Yield this user's processes that are tasks of a cluster, and their clusters."""
    for entry in _PROC.iterdir():
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        try:
            content = (entry / "environ").read_bytes()
        except OSError:  # it has ended, or belongs to somebody else
            continue
        for variable in content.split(b"\0"):
            name, _, value = variable.partition(b"=")
            if name == b"TF_CONFIG" and value:
                try:
                    yield int(entry.name), read_tf_config(value.decode(), needs_chief=False)
                except (ClusterConfigError, UnicodeDecodeError):
                    continue


def _parent_of(pid: int) -> int | None:
    try:
        return int((_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None
