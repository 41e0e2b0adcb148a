"""Runs the script of a chief with its restarts, and ends with it.

`tools/cli/scripts/run_state.py` decides what to do.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence

from kerasps.cluster.description.cluster_description import ClusterDescription
from kerasps.cluster.processes.process import child_environment
from kerasps.cluster.serving.listen_address import coordinator_listen_address
from kerasps.errors import ClusterConfigError
from kerasps.evaluator.process import EvaluatorProcess
from kerasps.runtime.addresses import split_address
from kerasps.runtime.supervision import Notice
from kerasps.tools.cli.scripts.run_state import (
    Command,
    End,
    EndHungWorker,
    EndScript,
    Event,
    NoticeReceived,
    RestartRun,
    RunState,
    Say,
    ScriptEnded,
    SignalReceived,
    TimePassed,
)
from kerasps.tools.cli.scripts.script_forks import ScriptForks
from kerasps.tools.cli.scripts.script_process import ScriptProcess, idle_tasks
from kerasps.tools.cli.scripts.signals import Signals
from kerasps.words import say

# The interval at which the launcher polls tasks and script: too short for a person to notice, and
# long enough to cost no processor time.
_POLL_INTERVAL_S = 0.05


def script_environment(
    description: ClusterDescription, variables: Mapping[str, str]
) -> dict[str, str]:
    """Return the environment of a script that is a task of a cluster."""
    env = child_environment(variables)
    env["TF_CONFIG"] = json.dumps(description.as_tf_config())
    # TF_CONFIG lists a chief already.
    env.pop("KERASPS_CHIEF", None)
    # The coordinator computes little. Without this it would take all memory of every GPU from the
    # workers.
    env.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
    return env


class ScriptRun:
    """Carries out the decisions of a `RunState`: starts the script, ends it, and restarts the run.

    This class does not touch the tasks. A subclass may end and start them.
    """

    def __init__(
        self,
        command: Sequence[str],
        description: ClusterDescription,
        state: RunState,
        name: str,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self._command = command
        self._description = description
        self._state = state
        self._name = name
        self._forks = ScriptForks(split_address(description.jobs["chief"][0])[1])
        self._env = {
            **script_environment(description, {**os.environ, **(variables or {})}),
            **self._forks.variables,
        }
        self._script: ScriptProcess | None = None
        # Where the script has made strategies, in any of its lives.
        self._strategies: set[str] = set()
        # The exit code of the launcher, None while it runs.
        self._code: int | None = None

    def until_the_end(
        self, received: list[signal.Signals], evaluator: EvaluatorProcess | None = None
    ) -> int:
        """Run the script with its restarts, and return the exit code."""
        signals = Signals(received)
        self._script = ScriptProcess(self._command, self._env)
        while True:
            # Signals first: processes that end because of one must not restart.
            new = signals.new()
            for number in new:
                self._handle(SignalReceived(number))
            for number in signals.to_pass_on(new):
                self._signal_script(number)
            for event in self._events():
                self._handle(event)
            if self._code is not None:
                idle = idle_tasks(self._strategies, self._description)
                if self._code == 0 and idle is not None:
                    self._say(idle)
                return self._code
            self._look_at_start()
            if evaluator is not None:
                evaluator.watch()
            time.sleep(_POLL_INTERVAL_S)

    def close(self) -> None:
        """Kill the script if it still runs."""
        if self._script is not None:
            self._script.close()
            self._script = None

    def end_forks_of_script(self) -> None:
        """Kill forks of the ended script that keep its port from the next one, and say so."""
        try:
            address = coordinator_listen_address(self._description, self._env)
        except ClusterConfigError:
            return  # the script could not listen there either
        if ended := self._forks.end(address):
            self._say(
                f"processes {', '.join(map(str, ended))}, which the script had forked, held its "
                "port and are killed"
            )

    def _look_at_start(self) -> None:
        """Continue the start of the tasks, if they start beside the script."""

    def _task_events(self) -> Iterator[Event]:
        """Return the events of the tasks."""
        return iter(())

    def _end_hung_worker(self, notice: Notice) -> None:
        """Kill a worker that does not answer."""

    def _restart_tasks(self) -> None:
        """Restart all tasks, empty. Here nothing: tasks that serve restart without this."""

    def _events(self) -> Iterator[Event]:
        """Yield all new events, at least `TimePassed`."""
        script = self._script
        # Polled first, so that the causes of the script's end are among the events below.
        code = None if script is None else script.poll()
        yield from self._task_events()
        if script is not None:
            for notice in script.notices():
                yield NoticeReceived(notice)
            self._strategies |= script.strategies
        if code is not None:
            self.close()
            yield ScriptEnded(code)
        yield TimePassed()

    def _handle(self, event: Event) -> None:
        for command in self._state.handle(event, time.monotonic()):
            self._carry_out(command)

    def _carry_out(self, command: Command) -> None:
        match command:
            case Say(text):
                self._say(text)
            case EndScript(number):
                self._signal_script(number)
            case EndHungWorker(notice):
                self._end_hung_worker(notice)
            case RestartRun():
                self.end_forks_of_script()
                self._restart_tasks()
                self._script = ScriptProcess(self._command, self._env)
            case End(code):
                self._code = code

    def _say(self, text: str) -> None:
        say(f"{self._name}: {text}")

    def _signal_script(self, number: int) -> None:
        if self._script is not None:
            self._script.send_signal(number)
