"""Runs the script of a worker that drives its own steps, on a node of `kerasps run`."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence

from kerasps.cluster.processes.process import describe_exit_code
from kerasps.cluster.processes.restarts import RestartBudget
from kerasps.cluster.serving.run_end import CODE_OF_LOST, RunEndWatch
from kerasps.tools.cli.scripts.script_process import ScriptProcess
from kerasps.tools.cli.scripts.signals import Signals

_POLL_INTERVAL_S = 0.05
_END_GRACE_S = 10.0


class DrivenScript:
    """The script of a worker that drives its own steps; the constructor starts it.

    It restarts a script that a signal ends.
    """

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        max_restarts: int,
        say: Callable[[str], None],
    ) -> None:
        self._command = command
        self._env = env
        self._budget = RestartBudget(max_restarts)
        self._say = say
        self._script = ScriptProcess(command, env)
        # Where the script has made strategies, in any of its lives.
        self.strategies: set[str] = set()
        self._has_lost_ps = False
        self._kill_at: float | None = None

    def until_the_end(self, received: list[signal.Signals], watch: RunEndWatch | None) -> int:
        """Run the script with its restarts, and return the exit code of this node."""
        signals = Signals(received)
        while True:
            for number in signals.to_pass_on(signals.new()):
                self._script.send_signal(number)
            code = self._poll()
            if code is not None:
                if self._is_restarted(code, received, watch):
                    continue
                code = self._code_of(code, watch)
                if code == 0 and watch is not None:
                    code = _wait_for_end_of_run(watch, received)
                return code
            if watch is not None and self._kill_at is None:
                self._look_at_end_of_run(watch)
            if self._kill_at is not None and time.monotonic() > self._kill_at:
                self._script.send_signal(signal.SIGKILL)
            time.sleep(_POLL_INTERVAL_S)

    @property
    def was_late(self) -> bool:
        """True if the run had ended before the script took part."""
        return self._kill_at is not None

    def close(self) -> None:
        """Kill the script if it still runs."""
        self._script.close()

    def _poll(self) -> int | None:
        code = self._script.poll()
        for notice in self._script.notices():
            self._has_lost_ps |= notice.task_type == "ps" and notice.what != "hung"
        self.strategies |= self._script.strategies
        return code

    def _look_at_end_of_run(self, watch: RunEndWatch) -> None:
        """End the script if the run has failed, or has ended before the script took part."""
        waits = self._script.waits_for_chief()
        # Report success for a script that still waits for the chief: nothing is left to do.
        watch.ended_with = 0 if waits else None
        if watch.is_over() and (watch.exit_code or waits):
            self._script.send_signal(signal.SIGTERM)
            self._kill_at = time.monotonic() + _END_GRACE_S

    def _is_restarted(
        self, code: int, received: list[signal.Signals], watch: RunEndWatch | None
    ) -> bool:
        is_over = watch is not None and watch.exit_code is not None
        if code >= 0 or received or is_over:
            return False
        restart = self._budget.grant(("worker", 0), time.monotonic())
        if restart is None:
            self._say(f"the script died ({describe_exit_code(code)}). {self._budget.refusal()}.")
            return False
        self._say(f"the script died ({describe_exit_code(code)}): {restart}. The others go on.")
        until = time.monotonic() + restart.pause_s
        while time.monotonic() < until and not received:
            time.sleep(_POLL_INTERVAL_S)
        if received:
            return False
        self._script.close()
        self._script = ScriptProcess(self._command, self._env)
        return True

    def _code_of(self, code: int, watch: RunEndWatch | None) -> int:
        if watch is not None and self._kill_at is not None:
            return watch.exit_code or 0
        if code > 0 and self._has_lost_ps:
            return CODE_OF_LOST
        return 128 - code if code < 0 else code


def _wait_for_end_of_run(watch: RunEndWatch, received: list[signal.Signals]) -> int:
    """Wait for the end of the run after the script succeeded; return the run's exit code."""
    watch.ended_with = 0
    before = len(received)
    while not watch.is_over():
        if len(received) > before:
            return 128 + received[-1]
        time.sleep(_POLL_INTERVAL_S)
    return watch.exit_code or 0
