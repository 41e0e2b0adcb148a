"""The state of a run of `kerasps launch` or `kerasps run`, and its next actions.

The class has no processes, pipes or clocks: events go in, commands come out, one at a time. So
tests can play any order of deaths in a moment (`tests/unit/test_run_state.py`).

A *run* is one life of the script. It ends with the script; then the launcher ends too, or restarts
all tasks and the script. The cluster handles workers that die during a run.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import dataclass

from kerasps.cluster.processes.process import describe_exit_code
from kerasps.cluster.processes.restarts import Restart, RestartBudget
from kerasps.runtime.supervision import Notice

# The time for a script that lost a ps to finish, such as by saving its state.
END_GRACE_S = 10.0
# The time from SIGTERM to SIGKILL. A script that waits for a lost ps would wait for ever.
KILL_GRACE_S = 5.0
# A dying task closes its connections before the system frees its memory and reports its death. So
# a script may fail before the launcher sees the death that caused it.
DEATH_GRACE_S = 0.5
# The exit code of a script that ends itself after SIGTERM, which a preemption sends.
_PREEMPTED = 128 + signal.SIGTERM
_COORDINATOR = ("chief", 0)
_HOUR_S = 3600.0
_WHERE_IT_GOES_ON = (
    "It resumes from the last backup of its `keras.callbacks.BackupAndRestore`; without one, from "
    "the beginning."
)


@dataclass(frozen=True)
class ScriptEnded:
    """The script has ended; `code` is negative for a signal."""

    code: int


@dataclass(frozen=True)
class PSDied:
    """The process of a ps died; `report` has the details."""

    index: int
    report: str


@dataclass(frozen=True)
class WorkerDied:
    """The process of a worker died; `text` reports it, and the cluster's reaction."""

    text: str


@dataclass(frozen=True)
class NoticeReceived:
    """The script has sent a notice about a task."""

    notice: Notice


@dataclass(frozen=True)
class SignalReceived:
    """The launcher received a signal to end."""

    number: int


@dataclass(frozen=True)
class TimePassed:
    """Time has passed without another event."""


Event = ScriptEnded | PSDied | WorkerDied | NoticeReceived | SignalReceived | TimePassed


@dataclass(frozen=True)
class Say:
    """Print a text."""

    text: str


@dataclass(frozen=True)
class EndScript:
    """Send the script a signal."""

    number: int


@dataclass(frozen=True)
class EndHungWorker:
    """Tell the cluster to kill a worker that does not answer."""

    notice: Notice


@dataclass(frozen=True)
class RestartRun:
    """Restart all tasks, empty, and then the script."""


@dataclass(frozen=True)
class End:
    """End the launcher, with this exit code."""

    code: int


Command = Say | EndScript | EndHungWorker | RestartRun | End


class RunState:
    """Decides how a run continues, or ends, after a death.

    Args:
        max_restarts: the number of restarts of the run that each ps, and the script, may cause in
            an hour.
        code_of_lost: the exit code if the script failed because a task is lost or absent, and is
            not restarted. None (default) takes the script's.
        death_grace_s: the seconds to wait, after the script failed, for the report of a death that
            caused it. Default 0.5; 0 if the caller sees no deaths.
    """

    def __init__(
        self,
        max_restarts: int,
        *,
        code_of_lost: int | None = None,
        death_grace_s: float = DEATH_GRACE_S,
    ) -> None:
        self._budget = RestartBudget(max_restarts)
        self._code_of_lost = code_of_lost
        self._death_grace_s = death_grace_s
        # The failures, oldest first, with their times.
        self._failures: list[tuple[float, str]] = []
        self._signal: int | None = None
        self._is_over = False
        self._begin_run()

    def _begin_run(self) -> None:
        # The exit code of the script, None while it runs; and the time to decide about it.
        self._code: int | None = None
        self._decide_at = 0.0
        # The task that the script reported as lost.
        self._reported_loss: tuple[str, int] | None = None
        # True if the script has waited in vain for a task.
        self._has_waited = False
        # True if a ps is lost; and the restart granted for it, None if the budget is used up.
        self._ps_is_gone = False
        self._granted: Restart | None = None
        # The times and numbers of signals to send to the script.
        self._end_script: list[tuple[float, int]] = []
        # The time at which the next run begins.
        self._start_at: float | None = None

    def handle(self, event: Event, now: float) -> Iterator[Command]:
        """Record an event, and yield the commands to carry out. `now` never decreases."""
        if isinstance(event, PSDied):
            yield from self._ps_died(event, now)
        elif isinstance(event, WorkerDied):
            yield from self._fail(event.text, now)
        elif isinstance(event, NoticeReceived):
            yield from self._handle_notice(event.notice, now)
        elif isinstance(event, SignalReceived):
            self._signal = self._signal or event.number
        elif isinstance(event, ScriptEnded):
            self._code = event.code
            self._decide_at = now if self._knows_why() else now + self._death_grace_s
        yield from self._look(now)

    def _look(self, now: float) -> Iterator[Command]:
        """Yield the commands that are due."""
        if self._is_over:
            return
        if self._start_at is not None:
            if self._signal is not None:
                yield self._end(128 + self._signal)
            elif now >= self._start_at:
                self._begin_run()
                yield RestartRun()
        elif self._code is not None:
            if self._knows_why() or now >= self._decide_at:
                yield from self._decide(self._code, now)
        elif self._signal is None and self._end_script and now >= self._end_script[0][0]:
            yield EndScript(self._end_script.pop(0)[1])

    # While the script runs

    def _fail(self, text: str, now: float) -> Iterator[Command]:
        """Record a failure, and print it unless a signal came: then tasks may end first."""
        self._failures.append((now, text))
        if self._signal is None:
            yield Say(text)

    def _ps_died(self, event: PSDied, now: float) -> Iterator[Command]:
        next_step = self._lose_ps(event.index, now)
        yield from self._fail(f"ps {event.index} died. {next_step}\n{event.report}", now)

    def _handle_notice(self, notice: Notice, now: float) -> Iterator[Command]:
        if notice.what == "absent":
            self._has_waited = True
        elif notice.what == "lost":
            self._reported_loss = notice.task_type, notice.task_index
        elif notice.task_type == "worker":
            yield EndHungWorker(notice)
        elif not self._ps_is_gone:
            index = notice.task_index
            yield from self._fail(f"ps {index} does not answer. {self._lose_ps(index, now)}", now)

    def _lose_ps(self, index: int, now: float) -> str:
        """Record that a ps is lost, which ends the run, and return a text about the next step."""
        if self._start_at is not None or self._granted is not None:
            return "It is started again with the others."
        self._ps_is_gone = True
        self._granted = self._budget.grant(("ps", index), now)
        if self._granted is None:
            return f"The run is {self._budget.refusal()}."
        self._end_script = [
            (now + END_GRACE_S, signal.SIGTERM),
            (now + END_GRACE_S + KILL_GRACE_S, signal.SIGKILL),
        ]
        return f"When the script has ended, the run is {self._granted}."

    # When it has ended

    def _knows_why(self) -> bool:
        """Return True if the reason for the script's end is known, so that no report is awaited."""
        return self._signal is not None or self._ps_is_gone or self._was_ended()

    def _was_ended(self) -> bool:
        """Return True if the script ended without an error: it succeeded, or a signal ended it."""
        return self._code is not None and (self._code <= 0 or self._code == _PREEMPTED)

    def _decide(self, code: int, now: float) -> Iterator[Command]:
        # Ctrl-C reaches the script directly, and ends everything.
        if code in (0, -signal.SIGINT) or self._signal is not None:
            yield self._end(code)
            return
        text = f"the script has ended ({describe_exit_code(code)})"
        if not self._ps_is_gone:
            if self._was_ended():
                task = _COORDINATOR
            elif self._reported_loss is not None:
                text += f": it has lost {self._reported_loss[0]} {self._reported_loss[1]}"
                # Workers have separate budgets, which are used up by now.
                task = self._reported_loss if self._reported_loss[0] == "ps" else _COORDINATOR
            else:
                # An error of the script, which would occur again; or it has waited long enough.
                yield self._end(self._of_lost(code) if self._has_waited else code)
                return
            self._granted = self._budget.grant(task, now)
            self._failures.append((now, text))
        if self._granted is None:
            yield from self._give_up(text, now)
            yield self._end(code if code == _PREEMPTED or code < 0 else self._of_lost(code))
            return
        self._start_at = now + self._granted.pause_s
        yield Say(f"{text}. The run is {self._granted}. {_WHERE_IT_GOES_ON}")
        yield from self._look(now)

    def _give_up(self, text: str, now: float) -> Iterator[Command]:
        if not self._ps_is_gone and not self._budget.is_off:
            yield Say(f"{text}. The run is {self._budget.refusal()}.")
        failures = [failure for time, failure in self._failures if now - time < _HOUR_S]
        if len(failures) > 1:
            # It may have caused the others, and is far up in the output by now.
            yield Say(f"this was the first failure:\n{failures[0]}")

    def _of_lost(self, code: int) -> int:
        return code if self._code_of_lost is None else self._code_of_lost

    def _end(self, code: int) -> End:
        self._is_over = True
        return End(code if code >= 0 else 128 - code)
