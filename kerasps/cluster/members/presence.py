"""The status of each task, as a state machine without threads and TensorFlow.

`MemberPoll` asks the tasks, and `Membership` hears of failures. `SharedPresence` brings both here
as events, one at a time, and does what follows from what comes back. Times are seconds of a clock
that never goes back. How long a task is silent is counted by another clock, which stands still
while this process is asleep or held up.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kerasps.runtime.probe import Answer

Task = tuple[str, int]


class Status(enum.Enum):
    """The status of a task."""

    THERE = "there"
    HUNG = "does not answer"
    LOST = "lost"
    LEAVING = "is about to leave"
    LEFT = "has left"
    JOINING = "joins"


# A task whose calls TensorFlow may be given.
_CONNECTED = (Status.THERE, Status.LEAVING)
# Calls to a task that is gone have ended by then. One that is started anew takes as long, mostly.
_SETTLE_S = 1.0


@dataclass
class _Known:
    address: str
    status: Status
    since: float
    # When the first of the questions was asked that were not answered since, by the clock of
    # silence; None where the last one was.
    silent_since: float | None = None
    # Answers now, and TensorFlow does not know it yet.
    is_back: bool = False
    # How often it was taken back: each time it has lost what it held.
    generation: int = 0
    # How often it was lost, or hung, and how often it was there again afterwards.
    losses: int = 0
    returns: int = 0
    reason: str = ""


@dataclass(frozen=True)
class Noticed:
    """A task has a new status.

    Args:
        task: its type and index.
        address: where it is.
        status: the new status.
        before: the status before.
        after_s: for how many seconds the one before lasted; where it hangs, those without answer.
        reason: why, in words; may be empty.
    """

    task: Task
    address: str
    status: Status
    before: Status
    after_s: float
    reason: str = ""


class Presence:
    """The status of each worker and ps.

    Args:
        addresses: the `"host:port"` of each task.
        limit_s: a task that is there and does not answer for so long hangs.
        now: the time.
    """

    def __init__(self, addresses: Mapping[Task, str], *, limit_s: float, now: float) -> None:
        self._limit_s = limit_s
        self._tasks = {
            task: _Known(address, Status.THERE, now) for task, address in addresses.items()
        }
        # When the tasks were asked last; until when the clock of silence has run, and what it says;
        # what it said when the tasks were asked last.
        self._ticked_at = self._ran_until = now
        self._clock = self._asked_at = 0.0

    # What others may know

    @property
    def addresses(self) -> dict[Task, str]:
        """The address of every task."""
        return {task: known.address for task, known in self._tasks.items()}

    def status(self, task: Task) -> Status:
        """Return what is known of a task."""
        return self._tasks[task].status

    def since(self, task: Task) -> float:
        """Return the time since which a task has its status."""
        return self._tasks[task].since

    def generation(self, task: Task) -> int:
        """Return how often a task was taken back."""
        return self._tasks[task].generation

    def changes(self, task: Task) -> tuple[int, int]:
        """Return how often a task was lost or hung, and how often it came back afterwards."""
        known = self._tasks[task]
        return known.losses, known.returns

    def of(self, job: str, *statuses: Status) -> list[int]:
        """Return the indices of a job's tasks that have one of `statuses`; without any, of all."""
        return sorted(
            index
            for (task_type, index), known in self._tasks.items()
            if task_type == job and (not statuses or known.status in statuses)
        )

    @property
    def connected(self) -> dict[Task, str]:
        """The addresses of the tasks that TensorFlow is to know.

        All ps are among them: to take one out is to give up its variables.
        """
        return {
            task: known.address
            for task, known in self._tasks.items()
            if known.status in _CONNECTED or task[0] == "ps"
        }

    @property
    def back(self) -> dict[Task, str]:
        """The addresses of tasks that answer again, or for the first time, and wait to be taken.

        A worker that was lost just now is not among them. Calls to it are still on their way: to
        their error, which TensorFlow may lose where the worker is taken back meanwhile.
        """
        return {
            t: k.address
            for t, k in self._tasks.items()
            if k.is_back and t[0] == "worker" and k.status not in _CONNECTED
            if k.status is Status.JOINING or self._ticked_at - k.since >= _SETTLE_S
        }

    @property
    def has_all_ps(self) -> bool:
        """True while every ps answers."""
        return not self.of("ps", Status.HUNG, Status.LOST)

    @property
    def is_anyone_away(self) -> bool:
        """True while a task is silent, lost or joining, and may answer at any time."""
        away = (Status.LOST, Status.HUNG, Status.JOINING, Status.LEFT)
        return any(
            known.status in away or known.silent_since is not None for known in self._tasks.values()
        )

    # What happens

    def tick(self, now: float, interval_s: float) -> None:
        """Note that the tasks are about to be asked, `interval_s` after the last answers.

        Where this process was asleep itself, no task is blamed for it.
        """
        self._run(now, interval_s)
        self._ticked_at, self._asked_at = now, self._clock

    def _run(self, now: float, most_s: float) -> None:
        """Advance the clock of silence, by `most_s` at most."""
        self._clock += min(now - self._ran_until, most_s)
        self._ran_until = now

    def hear(
        self, answers: Mapping[Task, Answer], now: float, answer_s: float = math.inf
    ) -> list[Noticed]:
        """Note what tasks answered to the question of the last `tick`; return what is new.

        Args:
            answers: what each has answered.
            now: the time.
            answer_s: how long they had for it. Longer than that, this process was held up.
        """
        self._run(now, answer_s)
        noticed: list[Noticed] = []
        for task, answer in answers.items():
            known = self._tasks.get(task)
            if known is None:
                continue
            if answer is Answer.SERVES:
                known.silent_since = None
                known.is_back = known.status not in _CONNECTED
                if known.status is Status.HUNG and task[0] == "ps":
                    noticed.append(self._become(task, Status.THERE, now))
                continue
            known.is_back = False
            if answer is Answer.REFUSES:
                known.silent_since = None  # its machine is awake
                continue
            if known.silent_since is None:
                known.silent_since = self._asked_at
            silent_s = self._clock - known.silent_since
            is_hung = silent_s >= self._limit_s
            # A call to it may have failed before, of a ping that was not answered.
            if known.status in (*_CONNECTED, Status.LOST) and is_hung:
                noticed.append(self._become(task, Status.HUNG, now, answer.value, silent_s))
        return noticed

    def impatient(self, answers: Mapping[Task, Answer], now: float) -> list[Noticed]:
        """Take those that did not answer for hung at once, since others wait for it."""
        return [
            self._become(task, Status.HUNG, now, answer.value, self._silent_s(task))
            for task, answer in answers.items()
            if answer is Answer.IS_SILENT and self._tasks[task].status in _CONNECTED
            if task[0] == "worker"
        ]

    def _silent_s(self, task: Task) -> float:
        since = self._tasks[task].silent_since
        return 0.0 if since is None else self._clock - since

    def lose(self, task: Task, now: float, reason: str) -> list[Noticed]:
        """Note that a call to a task failed, and that it does not know this process any more."""
        if self._tasks[task].status not in _CONNECTED:
            return []
        return [self._become(task, Status.LOST, now, reason)]

    def leave(self, task: Task, now: float) -> list[Noticed]:
        """Note that a task is about to leave: it finishes what it does, and is given no more."""
        if self._tasks[task].status is not Status.THERE:
            return []
        return [self._become(task, Status.LEAVING, now)]

    def left(self, task: Task, now: float) -> list[Noticed]:
        """Note that a task holds nothing any more, and may go."""
        if self._tasks[task].status is not Status.LEAVING:
            return []
        return [self._become(task, Status.LEFT, now)]

    def give_up_leaving(self, task: Task, now: float, reason: str) -> list[Noticed]:
        """Note that a task which is about to leave cannot finish what it does, and may go."""
        if self._tasks[task].status not in _CONNECTED:
            return []
        return [self._become(task, Status.LEFT, now, reason)]

    def take(self, tasks: Iterable[Task], now: float) -> list[Noticed]:
        """Note that TensorFlow knows tasks again."""
        noticed = []
        for task in tasks:
            self._tasks[task].generation += 1
            self._tasks[task].is_back = False
            self._tasks[task].silent_since = None
            noticed.append(self._become(task, Status.THERE, now))
        return noticed

    def move(self, addresses: Mapping[Task, str], now: float) -> list[Noticed]:
        """Note where tasks are now, and which are new. Those that are not named stay."""
        noticed = []
        for task, address in addresses.items():
            known = self._tasks.get(task)
            if known is None:
                self._tasks[task] = _Known(address, Status.JOINING, now)
                continue
            if known.address == address:
                continue
            old, known.address, known.is_back = known.address, address, False
            if known.status in _CONNECTED:
                reason = f"it is at {address} now, and was at {old}"
                noticed.append(self._become(task, Status.LOST, now, reason))
        return noticed

    def _become(
        self, task: Task, status: Status, now: float, reason: str = "", after_s: float | None = None
    ) -> Noticed:
        known = self._tasks[task]
        if after_s is None:
            after_s = now - known.since
        noticed = Noticed(task, known.address, status, known.status, after_s, reason)
        away = (Status.LOST, Status.HUNG)
        known.losses += status in away and known.status not in away
        known.returns += status is Status.THERE and known.losses > known.returns
        known.status, known.since, known.reason = status, now, reason
        return noticed
