"""Traces a running training, on all its tasks."""

from __future__ import annotations

import os
import time
from pathlib import Path

from kerasps.cluster.description.tf_config import read_tf_config
from kerasps.errors import ClusterConfigError, TaskUnreachableError
from kerasps.tools.cli.live.running import RunNotFoundError, chosen_run
from kerasps.tools.tracing.recording import MAX_SECONDS, Recording
from kerasps.tools.tracing.report import new_run, write_report
from kerasps.tools.tracing.steps import Task
from kerasps.words import say


def trace_running(log_dir: str, seconds: float, pid: int | None) -> int:
    """Record the tasks of a running training, write the files, and print what limits it.

    Args:
        pid: the process of the training's script on this machine. None takes the cluster in
            TF_CONFIG, else that of the only training on this machine.
    """
    if seconds > MAX_SECONDS:
        raise ClusterConfigError(
            f"The time is too long. Expected: {MAX_SECONDS:g} seconds at most. Received: "
            f"{seconds:g}. Record for a shorter time."
        )
    addresses = _addresses(pid)
    directory = Path(log_dir)
    run = new_run(directory)
    recording = Recording(addresses, f"kerasps-{run}-{os.getpid()}")
    say(f"kerasps trace: {len(addresses)} tasks record for {seconds:g} s.")
    recording.start()
    try:
        time.sleep(seconds)
    finally:
        say("kerasps trace: waiting for the recordings, on a busy machine for longer than that.")
        recording.stop()
    if not recording.contents:
        reasons = "; ".join(f"{job} {i}: {why}" for (job, i), why in recording.missing.items())
        raise TaskUnreachableError(
            "No task has recorded anything. Expected: a server of TensorFlow at the address of "
            f"each task. Received: {reasons}. Start the training first."
        )
    report = write_report(directory, run, addresses, recording, None)
    print(report, flush=True)
    return 0


def _addresses(pid: int | None) -> dict[Task, str]:
    """Return the addresses of the tasks of a training."""
    if pid is None and os.environ.get("TF_CONFIG"):
        return read_tf_config(needs_chief=False).addresses
    run = chosen_run("kerasps trace", pid, advice=", or set TF_CONFIG", one_of_cluster=True)
    if "jobs" not in run.reply:
        raise RunNotFoundError(
            f"Process {run.pid} does not give the addresses of its tasks. Expected: addresses. "
            f"Received: {run.reply}. Try again; if it persists, set TF_CONFIG."
        )
    return {
        (job, index): address
        for job, addresses in run.reply["jobs"].items()
        for index, address in enumerate(addresses)
        if address
    }
