"""Runs a script as the coordinator of a local cluster, and ends with it.

What dies on the way is started again: workers by the cluster, the whole run from here. What is to
be done is decided in `cli/run_state.py`. See `kerasps launch --help`.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Sequence

from kerasps.cli.run_state import (
    Command,
    End,
    EndHungWorker,
    EndScript,
    Event,
    PSDied,
    RunState,
    Say,
    ScriptEnded,
    StartAnew,
    TimePassed,
    Told,
    ToldToEnd,
    WorkerDied,
)
from kerasps.cli.signals import FORWARDED, EndedBySignal, Signals, end_with, signal_handlers
from kerasps.cli.worker_run import WorkerRun
from kerasps.cluster.local.launched_cluster import LaunchedCluster
from kerasps.cluster.local.local_cluster import LocalCluster, task_watch_of
from kerasps.cluster.local.local_ps import LocalPS
from kerasps.cluster.members.listeners import processes_listening_on
from kerasps.cluster.processes.process import child_environment, end_with_parent
from kerasps.cluster.processes.restarts import DEFAULT_MAX_RESTARTS
from kerasps.cluster.processes.task_watch import Death
from kerasps.evaluator.process import EvaluatorProcess
from kerasps.runtime.supervision import SupervisorPipe

# How often the launcher looks at tasks and script: a person does not notice it, and neither does
# the processor.
_POLL_INTERVAL_S = 0.05


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
    """Start a cluster, beside it a command as its coordinator, and close the cluster.

    Thread: the main thread, whose signal handlers it replaces for the time being.

    Args:
        command: the command and its arguments.
        num_workers: the number of worker processes.
        num_ps: the number of ps processes.
        mode: `"coordinator"` (default) runs the command once, as the coordinator; `"worker"` runs
            it as each worker, without a coordinator.
        log_dir: the directory for log files. None (default) takes a temporary one.
        start_timeout: the time limit in seconds for all processes to be ready. Default 60.
        max_restarts: how many times within an hour each worker is started again, and how many times
            each ps, and the command, may cause a restart of all. Default 3.
        evaluator: the command line that evaluates checkpoints meanwhile. None (default): none.
        evaluator_timeout: the seconds for the last evaluation after the command. Default 600.

    Returns:
        The exit code of the command, 128 + N where signal N ended it; 1 where it was 0 and the
        evaluator failed.

    Raises:
        TaskStartError: the cluster did not start.
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
            # From here on a signal is noted and dealt with in `_Run`. Set inside the other block,
            # so that none is missed.
            with (
                signal_handlers(lambda number, frame: received.append(signal.Signals(number))),
                cluster,
                _start_evaluator(evaluator, cluster, has_logs=log_dir is not None) as beside,
                _run_of(command, cluster, max_restarts) as run,
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
    """Start the process of an evaluator; return the context of it, of None without a command.

    Args:
        command: the evaluator's command line; None where there is no evaluator.
        cluster: the tasks.
        has_logs: whether its log goes to the cluster's directory, rather than to this terminal.
    """
    if command is None:
        return contextlib.nullcontext()
    logs = cluster.log_dir if has_logs else None
    return EvaluatorProcess(command, cluster.description, logs)


def _run_to_the_end(
    run: _Run | WorkerRun,
    cluster: LocalCluster,
    received: list[signal.Signals],
    evaluator: EvaluatorProcess | None,
    evaluator_timeout: float,
) -> int:
    """Run the command to its end, close the cluster, and wait for the evaluator.

    Returns:
        The exit code of the command; 1 where it was 0 and the evaluator failed.

    Raises:
        TaskStartError: the cluster did not start.
    """
    try:
        code = run.until_the_end(received, evaluator)
    finally:
        run.close()
        _close(cluster)
    # A signal means that all is to end, and soon.
    if evaluator is not None and not evaluator.finish(evaluator_timeout, lambda: bool(received)):
        code = code or 1
    return code


def _run_of(
    command: Sequence[str], cluster: LocalPS | LaunchedCluster, max_restarts: int
) -> _Run | WorkerRun:
    if isinstance(cluster, LocalPS):
        return WorkerRun(command, cluster, max_restarts)
    return _Run(command, cluster, RunState(max_restarts))


def _close(cluster: LocalCluster) -> None:
    with warnings.catch_warnings():
        # Dead tasks have been reported, and with more detail.
        warnings.simplefilter("ignore", RuntimeWarning)
        cluster.close()


class _Run:
    """Carries out what a `RunState` decides: starts the script, ends it, and starts all again.

    Args:
        command: the script's command line.
        cluster: the tasks.
        state: what decides.
    """

    def __init__(self, command: Sequence[str], cluster: LaunchedCluster, state: RunState) -> None:
        self._command = command
        self._cluster = cluster
        self._state = state
        self._deaths: queue.SimpleQueue[Death] = queue.SimpleQueue()
        self._watch = task_watch_of(cluster)
        self._watch.on_death = self._deaths.put
        self._env = child_environment(os.environ)
        self._env["TF_CONFIG"] = json.dumps(cluster.tf_config)
        # The coordinator computes little. Without this it would take all memory of every GPU away
        # from the workers.
        self._env.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
        self._pipe: SupervisorPipe | None = None
        self._script: subprocess.Popen[bytes] | None = None
        # The exit code of the launcher, None while it goes on.
        self._code: int | None = None

    def until_the_end(
        self, received: list[signal.Signals], evaluator: EvaluatorProcess | None
    ) -> int:
        """Run the script, as often as it takes, and return the exit code.

        Args:
            received: the signals that have come to the launcher, in their order; it grows.
            evaluator: the evaluator to watch meanwhile.

        Raises:
            TaskStartError: the cluster did not start.
        """
        signals = Signals(received)
        self._start_script()
        while True:
            # Signals first: what ends because of one is not to be started again.
            for number in signals.new():
                self._handle(ToldToEnd(number))
                if number in FORWARDED:
                    self._signal_script(number)
            if signals.is_interrupt_due():
                self._signal_script(signal.SIGINT)
            for event in self._events():
                self._handle(event)
            if self._code is not None:
                return self._code
            self._cluster.look_at_start()
            if evaluator is not None:
                evaluator.watch()
            time.sleep(_POLL_INTERVAL_S)

    def close(self) -> None:
        """Kill the script where it still runs, and close the pipe to it."""
        if self._script is not None:
            self._script.kill()
            self._script.wait()
            self._script = None
        self._close_pipe()

    def _close_pipe(self) -> None:
        if self._pipe is not None:
            self._pipe.close()

    def __enter__(self) -> _Run:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _events(self) -> Iterator[Event]:
        """Return what has happened, and never nothing: time passes."""
        # Asked first: whatever made the script end is found below.
        code = None if self._script is None else self._script.poll()
        while not self._deaths.empty():
            death = self._deaths.get()
            (job, index), text = death.task, str(death)
            if job == "worker":
                yield WorkerDied(text)
            # One that has been replaced meanwhile died for the last time with the last run.
            elif death.pid == self._cluster.processes[death.task].pid:
                yield PSDied(index, death.report)
        if self._pipe is not None:
            for notice in self._pipe.read():
                yield Told(notice)
        if code is not None:
            self._script = None
            yield ScriptEnded(code)
        yield TimePassed()

    def _handle(self, event: Event) -> None:
        for command in self._state.handle(event, time.monotonic()):
            self._carry_out(command)

    def _carry_out(self, command: Command) -> None:
        match command:
            case Say(text):
                print(f"kerasps launch: {text}", file=sys.stderr, flush=True)
            case EndScript(number):
                self._signal_script(number)
            case EndHungWorker(notice):
                self._watch.end_hung(notice)
            case StartAnew():
                self._end_forks_of_script()
                self._cluster.restart_all()
                self._start_script()
            case End(code):
                self._code = code

    def _start_script(self) -> None:
        self._close_pipe()
        # One for each start: what an earlier script had to say is no business of this one.
        self._pipe = SupervisorPipe()
        self._script = subprocess.Popen(
            self._command,
            env=self._env | self._pipe.variables,
            pass_fds=[self._pipe.fd_to_pass],
            preexec_fn=end_with_parent(),
        )
        self._pipe.has_been_passed()

    def _end_forks_of_script(self) -> None:
        """Kill what the script that has ended forked off, and where the next one could not listen.

        They cannot reach the cluster, and nobody waits for the data that they load.
        """
        _, _, port = self._cluster.description.jobs["chief"][0].rpartition(":")
        for pid in processes_listening_on(int(port)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _signal_script(self, number: int) -> None:
        if self._script is not None:
            self._script.send_signal(number)
