"""The state of a run of `kerasps launch` or `kerasps run`, and its next actions.

A class without processes, pipes and clocks: events go in, commands come out, one at a time. So any
order of deaths can be played in a moment (`tests/unit/test_run_state.py`).

A *run* is one life of the script. It ends with the script; then the launcher ends too, or starts
all tasks and the script again. Workers that die meanwhile are the cluster's business.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import dataclass

from kerasps.cluster.processes.process import describe_exit_code
from kerasps.cluster.processes.restarts import Restart, RestartBudget
from kerasps.runtime.supervision import Notice

# What a script that failed because of a ps may have to do still, such as saving what it holds.
END_GRACE_S = 10.0
# From SIGTERM to SIGKILL, where it does not end by itself. Whoever waits for a ps waits for ever.
KILL_GRACE_S = 5.0
# A task that dies closes its connections before its memory is freed, and only then is it gone: so a
# script may fail before the death is seen that it failed of.
DEATH_GRACE_S = 0.5
# What a script returns that has ended itself after SIGTERM, as a preemption sends it.
_PREEMPTED = 128 + signal.SIGTERM
_COORDINATOR = ("chief", 0)
_HOUR_S = 3600.0
_WHERE_IT_GOES_ON = (
    "It goes on from the last backup of its `keras.callbacks.BackupAndRestore`; without one, from "
    "the beginning."
)


@dataclass(frozen=True)
class ScriptEnded:
    """The script has ended; `code` is negative for a signal."""

    code: int


@dataclass(frozen=True)
class PSDied:
    """The process of a ps has died; `report` has the details."""

    index: int
    report: str


@dataclass(frozen=True)
class WorkerDied:
    """The process of a worker has died; `text` says so, and what the cluster does."""

    text: str


@dataclass(frozen=True)
class Told:
    """The script has said something of a task."""

    notice: Notice


@dataclass(frozen=True)
class ToldToEnd:
    """A signal has told the launcher to end."""

    number: int


@dataclass(frozen=True)
class TimePassed:
    """A while has passed without an event."""


Event = ScriptEnded | PSDied | WorkerDied | Told | ToldToEnd | TimePassed


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
class StartAnew:
    """Start all tasks again, empty, and then the script."""


@dataclass(frozen=True)
class End:
    """End the launcher, with this exit code."""

    code: int


Command = Say | EndScript | EndHungWorker | StartAnew | End


class RunState:
    """Decides what becomes of a run when something in it dies.

    Args:
        max_restarts: how many restarts of the run each ps, and the script, may cause in an hour.
        code_of_lost: the exit code where the script failed because a task is lost or absent, and
            is not restarted. None (default) takes the script's.
        death_grace_s: how long the death of a task may be seen after a script that failed of it.
            Default 0.5; 0 where deaths are not seen.
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
        # What has gone wrong, oldest first, with the time.
        self._failures: list[tuple[float, str]] = []
        self._signal: int | None = None
        self._is_over = False
        self._begin_run()

    def _begin_run(self) -> None:
        # The exit code of the script, None while it runs; and when to decide what follows from it.
        self._code: int | None = None
        self._decide_at = 0.0
        # What the script has said that it lost.
        self._told_lost: tuple[str, int] | None = None
        # Whether it has waited in vain for a task.
        self._has_waited = False
        # A ps is gone; and the restart that was granted for it, None where none was.
        self._ps_is_gone = False
        self._granted: Restart | None = None
        # When to send the script a signal, and which.
        self._end_script: list[tuple[float, int]] = []
        # When the next run begins.
        self._start_at: float | None = None

    def handle(self, event: Event, now: float) -> Iterator[Command]:
        """Take note of an event, and return what is to be done.

        Args:
            event: what has happened.
            now: the time in seconds; it never goes back.
        """
        if isinstance(event, PSDied):
            yield from self._ps_died(event, now)
        elif isinstance(event, WorkerDied):
            yield from self._fail(event.text, now)
        elif isinstance(event, Told):
            yield from self._told(event.notice, now)
        elif isinstance(event, ToldToEnd):
            self._signal = self._signal or event.number
        elif isinstance(event, ScriptEnded):
            self._code = event.code
            self._decide_at = now if self._knows_why() else now + self._death_grace_s
        yield from self._look(now)

    def _look(self, now: float) -> Iterator[Command]:
        """Do what is due."""
        if self._is_over:
            return
        if self._start_at is not None:
            if self._signal is not None:
                yield self._end(128 + self._signal)
            elif now >= self._start_at:
                self._begin_run()
                yield StartAnew()
        elif self._code is not None:
            if self._knows_why() or now >= self._decide_at:
                yield from self._decide(self._code, now)
        elif self._signal is None and self._end_script and now >= self._end_script[0][0]:
            yield EndScript(self._end_script.pop(0)[1])

    # While the script runs

    def _fail(self, text: str, now: float) -> Iterator[Command]:
        """Keep a failure, and say it. Told to end, the tasks may end before the launcher."""
        self._failures.append((now, text))
        if self._signal is None:
            yield Say(text)

    def _ps_died(self, event: PSDied, now: float) -> Iterator[Command]:
        next_step = self._lose_ps(event.index, now)
        yield from self._fail(f"ps {event.index} died. {next_step}\n{event.report}", now)

    def _told(self, notice: Notice, now: float) -> Iterator[Command]:
        if notice.what == "absent":
            self._has_waited = True
        elif notice.what == "lost":
            self._told_lost = notice.task_type, notice.task_index
        elif notice.task_type == "worker":
            yield EndHungWorker(notice)
        elif not self._ps_is_gone:
            index = notice.task_index
            yield from self._fail(f"ps {index} does not answer. {self._lose_ps(index, now)}", now)

    def _lose_ps(self, index: int, now: float) -> str:
        """Take note that the run cannot go on without a ps, and return what happens next."""
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
        """Return whether there is nothing to wait for that would say why the script has ended."""
        return self._signal is not None or self._ps_is_gone or self._was_ended()

    def _was_ended(self) -> bool:
        """Return whether the script has not failed by itself: all is done, or it got a signal."""
        return self._code is not None and (self._code <= 0 or self._code == _PREEMPTED)

    def _decide(self, code: int, now: float) -> Iterator[Command]:
        # Ctrl-C reaches the script by itself, and says that all is to end.
        if code in (0, -signal.SIGINT) or self._signal is not None:
            yield self._end(code)
            return
        text = f"the script has ended ({describe_exit_code(code)})"
        if not self._ps_is_gone:
            if self._was_ended():
                task = _COORDINATOR
            elif self._told_lost is not None:
                text += f": it has lost {self._told_lost[0]} {self._told_lost[1]}"
                # Workers have budgets of their own, and those are used up by now.
                task = self._told_lost if self._told_lost[0] == "ps" else _COORDINATOR
            else:
                # An error of its own, which it would end in again; or it has waited long enough.
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
            # The others may follow from it, and it is far up by now.
            yield Say(f"this was the first failure:\n{failures[0]}")

    def _of_lost(self, code: int) -> int:
        return code if self._code_of_lost is None else self._code_of_lost

    def _end(self, code: int) -> End:
        self._is_over = True
        return End(code if code >= 0 else 128 - code)
