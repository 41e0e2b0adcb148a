"""Runs a script as each worker of a cluster whose workers drive their own steps."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import time
from collections.abc import Sequence

from kerasps.cluster.local.launched_cluster import LocalPS
from kerasps.cluster.local.local_cluster import task_watch_of
from kerasps.cluster.processes.logs import open_log
from kerasps.cluster.processes.process import describe_exit_code
from kerasps.cluster.processes.restarts import RestartBudget
from kerasps.cluster.processes.task_watch import Death
from kerasps.evaluator.process import EvaluatorProcess
from kerasps.runtime.inbox import Inbox
from kerasps.tools.cli.scripts.script_process import ScriptProcess, idle_tasks
from kerasps.tools.cli.scripts.signals import Signals
from kerasps.words import say

# The interval at which the launcher polls the workers: too short for a person to notice, and long
# enough to cost no processor time.
_POLL_INTERVAL_S = 0.05
# The same time as for a task of the cluster.
_TERMINATE_GRACE_S = 3.0
# A dying ps closes its connections before the system frees its memory and reports its death. So a
# worker may fail before the launcher sees the death that caused it.
_DEATH_GRACE_S = 0.5
_CHIEF = 0


class WorkerRun:
    """Runs a command as each worker, and restarts a worker that a signal has ended.

    Worker 0 is the chief, and uses the terminal. The others write to log files.
    """

    def __init__(self, command: Sequence[str], cluster: LocalPS, max_restarts: int) -> None:
        self._command = command
        self._cluster = cluster
        self._budget = RestartBudget(max_restarts)
        self._processes: dict[int, ScriptProcess] = {}
        # Workers that started after the chief ended the run, and wait for it in vain.
        self._late: set[int] = set()
        # The times at which workers that a signal ended restart.
        self._due: dict[int, float] = {}
        self._codes: dict[int, int] = {}
        self._deaths: Inbox[Death] = Inbox()
        task_watch_of(cluster).on_death = self._deaths.put
        # Where the scripts have made strategies.
        self._strategies: set[str] = set()
        # True if no worker may restart.
        self._is_ending = False

    def until_the_end(
        self, received: list[signal.Signals], evaluator: EvaluatorProcess | None
    ) -> int:
        """Run the workers until all have ended, and return the exit code.

        It is the chief's, or if that is 0, the first of the others' that is not 0.
        """
        signals = Signals(received)
        for worker in range(len(self._cluster.description.jobs["worker"])):
            self._start(worker)
        while self._processes or self._due:
            new = signals.new()
            if new:
                self._end_begins()
            for number in signals.to_pass_on(new):
                self._signal_all(number)
            self._look_at_ps()
            self._look_at_workers()
            if evaluator is not None:
                evaluator.watch()
            time.sleep(_POLL_INTERVAL_S)
        codes = [self._codes[worker] for worker in sorted(self._codes)]
        code = next((code for code in codes if code), 0)
        idle = idle_tasks(self._strategies, self._cluster.description, driven=True)
        if code == 0 and idle is not None:
            _say(idle)
        return 128 - code if code < 0 else code

    def close(self) -> None:
        """End the running workers by SIGTERM and, after 3 seconds, SIGKILL."""
        self._signal_all(signal.SIGTERM)
        deadline = time.monotonic() + _TERMINATE_GRACE_S
        for process in self._processes.values():
            process.wait(max(0.0, deadline - time.monotonic()))
            process.close()
        self._processes.clear()

    def _start(self, worker: int) -> None:
        env = self._cluster.worker_environment(worker)
        if worker == _CHIEF:
            # The chief's output is for the user, so only the user's setting limits it.
            env.pop("TF_CPP_MIN_LOG_LEVEL", None)
            if "TF_CPP_MIN_LOG_LEVEL" in os.environ:
                env["TF_CPP_MIN_LOG_LEVEL"] = os.environ["TF_CPP_MIN_LOG_LEVEL"]
            self._processes[worker] = ScriptProcess(self._command, env)
            return
        with open_log(self._cluster.log_dir / f"worker-{worker}.log") as log:
            self._processes[worker] = ScriptProcess(
                self._command, env, stdin=subprocess.DEVNULL, output=log
            )

    def _look_at_ps(self, wait_s: float = 0.0) -> None:
        while True:
            try:
                death = self._deaths.get(wait_s)
            except queue.Empty:
                return
            wait_s = 0.0
            if not self._is_ending:
                _say(
                    f"{death.task[0]} {death.task[1]} {death.what}. Its variables are lost, and "
                    f"the workers end.\n{death.report}"
                )
            self._cluster.keep_logs()
            self._end_begins()

    def _look_at_workers(self) -> None:
        for worker, process in list(self._processes.items()):
            code = process.poll()  # before the notices, of which its last are then read
            process.notices()
            self._strategies |= process.strategies
            if worker != _CHIEF and self._codes.get(_CHIEF) == 0 and process.waits_for_chief():
                self._late.add(worker)
                process.send_signal(signal.SIGTERM)
            if code is not None:
                process.close()
                del self._processes[worker]
                self._has_ended(worker, code)
        for worker, due in list(self._due.items()):
            if self._is_ending or time.monotonic() >= due:
                del self._due[worker]
                if not self._is_ending:
                    self._start(worker)

    def _has_ended(self, worker: int, code: int) -> None:
        self._codes[worker] = code = 0 if worker in self._late else code
        if code > 0 and not self._is_ending:
            self._look_at_ps(_DEATH_GRACE_S)
        if code == 0 or self._is_ending:
            return
        # Once the chief has ended the run, no worker can begin it again.
        is_over = self._codes.get(_CHIEF) == 0
        restart = None
        if code < 0 and not is_over:
            restart = self._budget.grant(("worker", worker), time.monotonic())
        name = f"worker {worker}" + (", the chief," if worker == _CHIEF else "")
        how = describe_exit_code(code)
        if restart is not None:
            _say(f"{name} died ({how}): {restart}. The others go on.")
            del self._codes[worker]
            self._due[worker] = time.monotonic() + restart.pause_s
            return
        self._cluster.keep_logs()
        why = f" {self._budget.refusal()}." if code < 0 and not is_over else ""
        log = "" if worker == _CHIEF else f" Its log: {self._cluster.log_dir}/worker-{worker}.log"
        _say(f"{name} failed ({how}).{why}{log}")
        if worker == _CHIEF:
            self._end_begins()
            self._signal_all(signal.SIGTERM)

    def _end_begins(self) -> None:
        self._is_ending = True

    def _signal_all(self, number: int) -> None:
        for process in self._processes.values():
            process.send_signal(number)


def _say(what: str) -> None:
    say(f"kerasps launch: {what}")
