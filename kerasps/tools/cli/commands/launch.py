"""Runs a script as the coordinator of a local cluster, and ends with it.

The cluster restarts workers that die, and this module restarts the whole run.
`tools/cli/scripts/run_state.py` decides when. See `kerasps launch --help`.
"""

from __future__ import annotations

import contextlib
import queue
import signal
import warnings
from collections.abc import Iterator, Sequence

from kerasps.cluster.local.launched_cluster import LaunchedCluster, LocalPS
from kerasps.cluster.local.local_cluster import LocalCluster, task_watch_of
from kerasps.cluster.processes.restarts import DEFAULT_MAX_RESTARTS
from kerasps.cluster.processes.task_watch import Death
from kerasps.evaluator.process import EvaluatorProcess
from kerasps.runtime.supervision import Notice
from kerasps.tools.cli.scripts.run_state import Event, PSDied, RunState, WorkerDied
from kerasps.tools.cli.scripts.script_run import ScriptRun
from kerasps.tools.cli.scripts.signals import EndedBySignal, end_with, signal_handlers
from kerasps.tools.cli.scripts.worker_run import WorkerRun


def launch(
    command: Sequence[str],
    *,
    num_workers: int,
    num_ps: int,
    mode: str = "coordinator",
    log_dir: str | None = None,
    start_timeout: float = 60.0,
    max_restarts: int = DEFAULT_MAX_RESTARTS,
    evaluator: Sequence[str] | None = None,
    evaluator_timeout: float = 600.0,
) -> int:
    """Start a cluster, run a command as its coordinator, and close the cluster.

    Thread: the main thread, whose signal handlers it replaces during the call.
    """
    received: list[signal.Signals] = []
    try:
        with signal_handlers(end_with):
            cluster = (LocalPS if mode == "worker" else LaunchedCluster)(
                num_workers,
                num_ps,
                log_dir=log_dir,
                start_timeout=start_timeout,
                max_restarts=max_restarts,
            )
            # From here on the handler records signals, and the run handles them. It is set inside
            # the other block, so that no signal is missed.
            with (
                signal_handlers(lambda number, frame: received.append(signal.Signals(number))),
                cluster,
                _start_evaluator(evaluator, cluster, has_logs=log_dir is not None) as beside,
                contextlib.closing(_run_of(command, cluster, max_restarts)) as run,
            ):
                code = _run_to_the_end(run, cluster, received, beside, evaluator_timeout)
    except EndedBySignal as ended:
        return 128 + ended.number
    if signal.SIGINT in received and code != 0:
        return 128 + signal.SIGINT
    return code


def _start_evaluator(
    command: Sequence[str] | None, cluster: LocalCluster, *, has_logs: bool
) -> contextlib.AbstractContextManager[EvaluatorProcess | None]:
    """Start an evaluator's process; return its context, or one of None without a command."""
    if command is None:
        return contextlib.nullcontext()
    logs = cluster.log_dir if has_logs else None
    return contextlib.closing(EvaluatorProcess(command, cluster.description, logs))


def _run_to_the_end(
    run: ScriptRun | WorkerRun,
    cluster: LocalCluster,
    received: list[signal.Signals],
    evaluator: EvaluatorProcess | None,
    evaluator_timeout: float,
) -> int:
    """Run the command to its end, close the cluster, and wait for the evaluator."""
    try:
        code = run.until_the_end(received, evaluator)
    finally:
        run.close()
        _close(cluster)
    # After a signal everything has to end soon.
    if evaluator is not None and not evaluator.finish(evaluator_timeout, lambda: bool(received)):
        code = code or 1
    return code


def _run_of(
    command: Sequence[str], cluster: LocalPS | LaunchedCluster, max_restarts: int
) -> ScriptRun | WorkerRun:
    if isinstance(cluster, LocalPS):
        return WorkerRun(command, cluster, max_restarts)
    return _LocalRun(command, cluster, RunState(max_restarts))


def _close(cluster: LocalCluster) -> None:
    with warnings.catch_warnings():
        # Dead tasks have been reported already, with more detail.
        warnings.simplefilter("ignore", RuntimeWarning)
        cluster.close()


class _LocalRun(ScriptRun):
    """A run whose tasks are processes of this command."""

    def __init__(self, command: Sequence[str], cluster: LaunchedCluster, state: RunState) -> None:
        super().__init__(command, cluster.description, state, "kerasps launch")
        self._cluster = cluster
        self._deaths: queue.SimpleQueue[Death] = queue.SimpleQueue()
        self._watch = task_watch_of(cluster)
        self._watch.on_death = self._deaths.put

    def _look_at_start(self) -> None:
        self._cluster.look_at_start()

    def _task_events(self) -> Iterator[Event]:
        while not self._deaths.empty():
            death = self._deaths.get()
            (job, index), text = death.task, str(death)
            if job == "worker":
                yield WorkerDied(text)
            # Ignore the death of a process that has been replaced: it belongs to the last run.
            elif death.pid == self._cluster.processes[death.task].pid:
                yield PSDied(index, death.report)

    def _end_hung_worker(self, notice: Notice) -> None:
        self._watch.end_hung(notice)

    def _restart_tasks(self) -> None:
        self._cluster.restart_all()
