"""The status of each task, as a state machine without threads and TensorFlow.

`MemberPoll` polls the tasks, and callers report failures to `Membership`. `SharedPresence` passes
both to this machine as events, one at a time, and acts on the changes that it returns. Times are
seconds of a monotonic clock. Another clock measures the silence of a task: it stops while this
process is suspended or delayed.
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

    CONNECTED = "connected"
    HUNG = "hangs"
    LOST = "lost"
    LEAVING = "leaving"
    LEFT = "left"
    JOINING = "joining"


# The statuses of tasks that TensorFlow may call.
_CONNECTED = (Status.CONNECTED, Status.LEAVING)
# By then, calls to an ended task have ended. Restarting a task usually takes as long.
_SETTLE_S = 1.0


@dataclass
class _Known:
    address: str
    status: Status
    since: float
    # The time of the first unanswered probe since the last answer, by the clock of silence; None if
    # it answered the last probe.
    silent_since: float | None = None
    # True if it answers and TensorFlow does not know it yet.
    is_back: bool = False
    # It is about to leave, and is told that it may end.
    may_end: bool = False
    # The number of times it was reconnected; each time it had lost its state.
    generation: int = 0
    # The number of times it was lost, or hung, and the number of times it returned afterwards.
    losses: int = 0
    returns: int = 0
    reason: str = ""


@dataclass(frozen=True)
class Noticed:
    """A change of a task's status."""

    task: Task
    address: str
    status: Status
    before: Status
    # How long the status before lasted; for a task that hangs, the time without an answer.
    after_s: float
    reason: str = ""


class Presence:
    """The status of each worker and ps."""

    def __init__(self, addresses: Mapping[Task, str], *, limit_s: float, now: float) -> None:
        self._limit_s = limit_s
        self._tasks = {
            task: _Known(address, Status.CONNECTED, now) for task, address in addresses.items()
        }
        # The time of the last probe; the time up to which the clock of silence has advanced; the
        # clock's value, now and at the last probe.
        self._ticked_at = self._ran_until = now
        self._clock = self._asked_at = 0.0

    # Queries

    @property
    def addresses(self) -> dict[Task, str]:
        """The address of every task."""
        return {task: known.address for task, known in self._tasks.items()}

    def status(self, task: Task) -> Status:
        """Return the status of a task."""
        return self._tasks[task].status

    def since(self, task: Task) -> float:
        """Return the time since which a task has its status."""
        return self._tasks[task].since

    def is_silent(self, task: Task) -> bool:
        """Return whether a task did not answer the last probe, or cannot be called."""
        known = self._tasks[task]
        return known.status not in _CONNECTED or known.silent_since is not None

    def generation(self, task: Task) -> int:
        """Return how often a task was reconnected."""
        return self._tasks[task].generation

    def changes(self, task: Task) -> tuple[int, int]:
        """Return how often a task was lost or hung, and how often it returned afterwards."""
        known = self._tasks[task]
        return known.losses, known.returns

    def of(self, job: str, *statuses: Status) -> list[int]:
        """Return the indices of a job's tasks that have one of `statuses`; of all if none given."""
        return sorted(
            index
            for (task_type, index), known in self._tasks.items()
            if task_type == job and (not statuses or known.status in statuses)
        )

    @property
    def connected(self) -> dict[Task, str]:
        """The addresses of the tasks that TensorFlow must know.

        All ps are among them: removing one gives up its variables.
        """
        return {
            task: known.address
            for task, known in self._tasks.items()
            if known.status in _CONNECTED or task[0] == "ps"
        }

    @property
    def back(self) -> dict[Task, str]:
        """The addresses of workers that answer, again or for the first time, and are not connected.

        A worker that was lost just now is not among them. Calls to it are still in flight and will
        fail; if the worker were reconnected meanwhile, TensorFlow might lose their errors.
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
    def has_absent_tasks(self) -> bool:
        """True while a task is silent, lost, joining or has left, and may answer at any time."""
        absent = (Status.LOST, Status.HUNG, Status.JOINING, Status.LEFT)
        return any(
            known.status in absent or known.silent_since is not None
            for known in self._tasks.values()
        )

    # Events

    def tick(self, now: float, interval_s: float) -> None:
        """Record that a probe of all tasks begins, `interval_s` after the last answers.

        Time in which this process was suspended does not count as silence of a task.
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
        """Record the answers of tasks to the probe of the last `tick`; return the changes.

        Args:
            answer_s: the time limit of the answers. If more time has passed, this process was
                delayed, and the rest does not count as silence.
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
                    noticed.append(self._become(task, Status.CONNECTED, now))
                continue
            known.is_back = False
            if answer is Answer.REFUSES:
                known.silent_since = None  # its machine answers
                continue
            if known.silent_since is None:
                known.silent_since = self._asked_at
            silent_s = self._clock - known.silent_since
            is_hung = silent_s >= self._limit_s
            # LOST too: a call to it may have failed before, because a gRPC ping got no answer.
            if known.status in (*_CONNECTED, Status.LOST) and is_hung:
                noticed.append(self._become(task, Status.HUNG, now, answer.value, silent_s))
        return noticed

    def count_silent_as_hung(self, answers: Mapping[Task, Answer], now: float) -> list[Noticed]:
        """Count silent workers as hung at once, since a cluster update waits for them."""
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
        """Record that a call to a task failed, and that it does not know this process any more."""
        if self._tasks[task].status not in _CONNECTED:
            return []
        if self._tasks[task].may_end:
            return self.left(task, now)
        return [self._become(task, Status.LOST, now, reason)]

    def begin_leaving(self, task: Task, now: float) -> list[Noticed]:
        """Record that a task is about to leave: it finishes its steps, and gets no new ones."""
        if self._tasks[task].status is not Status.CONNECTED:
            return []
        return [self._become(task, Status.LEAVING, now)]

    def let_end(self, task: Task) -> None:
        """Record that a task which is about to leave is told that it may end."""
        self._tasks[task].may_end = True

    def left(self, task: Task, now: float) -> list[Noticed]:
        """Record that a task has finished, has no pending results, and may end."""
        if self._tasks[task].status is not Status.LEAVING:
            return []
        return [self._become(task, Status.LEFT, now)]

    def give_up_leaving(self, task: Task, now: float, reason: str) -> list[Noticed]:
        """Record that a task which is about to leave cannot finish its steps, and may end."""
        if self._tasks[task].status not in _CONNECTED:
            return []
        return [self._become(task, Status.LEFT, now, reason)]

    def mark_connected(self, tasks: Iterable[Task], now: float) -> list[Noticed]:
        """Record that TensorFlow has reconnected tasks."""
        noticed = []
        for task in tasks:
            self._tasks[task].generation += 1
            self._tasks[task].is_back = self._tasks[task].may_end = False
            self._tasks[task].silent_since = None
            noticed.append(self._become(task, Status.CONNECTED, now))
        return noticed

    def move(self, addresses: Mapping[Task, str], now: float) -> list[Noticed]:
        """Record the current addresses of tasks, and new tasks. Other tasks do not change."""
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
        lost = (Status.LOST, Status.HUNG)
        known.losses += status in lost and known.status not in lost
        known.returns += status is Status.CONNECTED and known.losses > known.returns
        known.status, known.since, known.reason = status, now, reason
        return noticed
