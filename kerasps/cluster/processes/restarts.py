"""The number of restarts of a task and the pauses before them, without clocks."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from kerasps.checks import count

DEFAULT_MAX_RESTARTS = 3
_WINDOW_S = 3600.0
# The first restart comes at once: most tasks die once. The next ones wait one, two, four seconds,
# in which a problem of the machine may pass.
_FIRST_PAUSE_S = 1.0
_MAX_PAUSE_S = 30.0

Task = tuple[str, int]


@dataclass(frozen=True)
class Restart:
    """A restart that is granted: its number within the last hour, from 1, of the limit."""

    pause_s: float
    number: int
    of: int

    def __str__(self) -> str:
        pause = f" in {self.pause_s:g} s" if self.pause_s else ""
        return f"started again{pause}, {self.number} of {self.of} in this hour"


class RestartBudget:
    """Grants each task a number of restarts in any hour."""

    def __init__(self, max_restarts: int) -> None:
        self._max_restarts = count(
            "`max_restarts` is not a count",
            max_restarts,
            least=0,
            expected="an int of at least 0",
            advice="Give a number like 3, or 0 to restart nothing.",
        )
        self._granted: dict[Task, deque[float]] = {}

    @property
    def is_off(self) -> bool:
        """True if no task is ever restarted."""
        return self._max_restarts == 0

    def has_left(self, task: Task, now: float) -> bool:
        """Return whether a restart of the task would be granted."""
        return len(self._within_the_hour(task, now)) < self._max_restarts

    def grant(self, task: Task, now: float) -> Restart | None:
        """Return the next restart of a task that has died, None if there were too many."""
        before = self._within_the_hour(task, now)
        if len(before) >= self._max_restarts:
            return None
        pause = min(_MAX_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** (len(before) - 1)) if before else 0.0
        before.append(now)
        return Restart(pause, len(before), self._max_restarts)

    def refusal(self) -> str:
        """Return the reason for granting no restart, in words: `"not started again: ..."`."""
        if self.is_off:
            return "not started again: restarts are turned off"
        times = "1 restart" if self._max_restarts == 1 else f"{self._max_restarts} restarts"
        return f"not started again: {times} within an hour"

    def _within_the_hour(self, task: Task, now: float) -> deque[float]:
        granted = self._granted.setdefault(task, deque())
        while granted and now - granted[0] >= _WINDOW_S:
            granted.popleft()
        return granted
