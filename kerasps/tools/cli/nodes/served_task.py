"""Serves a worker or ps task for the commands `serve` and `run`."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable
from typing import NoReturn

from kerasps.cluster.description.cluster_description import ClusterDescription
from kerasps.cluster.server import serve
from kerasps.cluster.serving.renewal import AfterTheEnd, End, restart_process
from kerasps.cluster.serving.run_end import RunEndWatch, wait_for_run_end
from kerasps.errors import ClusterConfigError
from kerasps.runtime.addresses import split_address
from kerasps.words import say

# The time that a ps serves workers that are still training when the chief has ended.
_LINGER_S = 600.0
# The time limit for the node of the script to announce that the run has ended.
_HEAR_OF_END_S = 1.0
_CHIEF = ("chief", 0)


def say_as(name: str, text: str) -> None:
    """Print a line of the command that has this name."""
    say(f"{name}: {text}")


def chief_of(description: ClusterDescription) -> tuple[tuple[str, int], str] | None:
    """Return the task that is the chief, and its address; None if they are not known."""
    addresses = description.addresses
    for task in (_CHIEF, ("worker", 0)):
        if task in addresses and not description.is_sparse:
            return task, addresses[task]
    return None


def serve_task(
    description: ClusterDescription,
    *,
    name: str,
    bind: str | None,
    mode: str,
    until: End | None,
    restarts: bool,
    signal_sets_code: bool = False,
) -> NoReturn:
    """Serve a task until a signal, or until the end that `until` watches for.

    Args:
        restarts: whether the task restarts when the coordinator has ended; else it ends.
        signal_sets_code: as for `cluster.server.serve`.
    """
    task = description.task
    task_name = f"{task[0]} {task[1]}"

    def ready(port: int, address: str | None) -> None:
        say_as(
            name, f"{task_name} listens on port {port} of {address or 'every network interface'}"
        )

    def coordinator_gone(port: int) -> int:
        chief = description.jobs["chief"][0]
        if not restarts:
            return wait_for_run_end(chief, task, timeout_s=_HEAR_OF_END_S) or 0
        say_as(
            name,
            f"the coordinator at {chief} has ended; {task_name} restarts, without the state that "
            "it held",
        )
        restart_process(port)

    has_coordinator = mode == "coordinator" and "chief" in description.jobs
    # TensorFlow reads it when it is imported. As in the tasks of a `LocalCluster`: errors only.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    if task[0] == "ps":
        os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
    with warnings.catch_warnings():
        warnings.showwarning = _printing_as(name)
        serve(
            description,
            bind=bind,
            on_ready=ready,
            on_coordinator_gone=coordinator_gone if has_coordinator else None,
            until=until,
            signal_sets_code=signal_sets_code,
        )


def _printing_as(name: str) -> Callable[..., None]:
    """Return a function that prints a warning like an error, without its line of code."""

    def show(message: Warning | str, *where: object, **more: object) -> None:
        say_as(name, f"warning: {message}")

    return show


def end_with_chief(description: ClusterDescription, mode: str) -> End:
    """Return a watch that ends a task of `kerasps serve` with its chief."""
    chief = chief_of(description)
    if chief is None:
        raise ClusterConfigError(
            "There is no chief to end with. Expected: TF_CONFIG with the address of the chief. "
            f"Received: {dict(description.jobs)}. Leave --exit-with-chief out, or add the chief."
        )
    return end_of_run("kerasps serve", description, chief[1], mode, timeout_s=math.inf)


def end_of_run(
    name: str, description: ClusterDescription, chief: str, mode: str, *, timeout_s: float
) -> End:
    """Return a watch that ends a served task with its run.

    Args:
        timeout_s: the task ends if no process listens at `chief` for this many seconds.
    """
    watch = RunEndWatch(
        chief,
        description.task,
        port=split_address(str(description.address))[1],
        timeout_s=timeout_s,
        say=lambda text: say_as(name, text),
    )
    return watch if mode == "coordinator" else _AfterWorkers(str(description.address), watch)


class _AfterWorkers(AfterTheEnd):
    """Ends a ps whose workers drive their own steps, and may end after the chief."""

    def __init__(self, address: str, watch: RunEndWatch) -> None:
        super().__init__(address, watch.is_over, linger_s=_LINGER_S)
        self._watch = watch

    def is_over(self) -> bool:
        is_over = super().is_over()
        self.exit_code = self._watch.exit_code
        # If the run has failed, the workers end too.
        return is_over or bool(self.exit_code)
