"""The last events of an epoch's state, with the commands that followed, for bug reports."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from kerasps.training.epoch.epoch_events import (
    Command,
    Event,
    Report,
    ResultCollected,
    ResultReturned,
    Send,
    StepsAsked,
)

# A bug report may have this many lines.
_NUM_EVENTS = 1000

# Only these fields are kept of events and commands that refer to batches or results, so that the
# log holds no data.
_KEPT: dict[type, tuple[tuple[str, ...], Callable[[Any], tuple[Any, ...]]]] = {
    StepsAsked: (
        ("num_steps", "header"),
        lambda e: (StepsAsked, e.execution.num_steps, e.execution.header),
    ),
    Send: (
        ("worker", "num_steps", "header", "applied"),
        lambda c: (
            Send,
            c.worker,
            c.execution.num_steps,
            c.execution.header,
            c.execution.applied,
        ),
    ),
    ResultReturned: (("worker", "steps"), lambda e: (ResultReturned, e.worker, e.steps)),
    ResultCollected: (
        ("worker", "steps", "at"),
        lambda e: (ResultCollected, e.worker, e.steps, e.at),
    ),
    Report: (
        ("missing_steps", "split", "first_batch", "pushes"),
        lambda c: (Report, c.missing_steps, c.split, c.first_batch, c.pushes),
    ),
}


class EpochLog:
    """Keeps the last 1000 events of an epoch's state, and the commands that followed each.

    Only `text` formats them. The log keeps no batches and no results.
    """

    def __init__(self) -> None:
        self._num_events = 0
        # For each event: its kept fields, and those of its commands.
        self._entries: deque[tuple[Any, list[Any]]] = deque(maxlen=_NUM_EVENTS)

    def add_event(self, event: Event) -> None:
        """Note an event that the state is about to handle."""
        self._num_events += 1
        self._entries.append((_kept(event), []))

    def add_commands(self, commands: Iterable[Command]) -> None:
        """Note the commands that follow from the event that was added last."""
        kept = self._entries[-1][1]
        for command in commands:
            kept.append(_kept(command))

    def text(self, num_events: int = _NUM_EVENTS) -> str:
        """Return the last events as text, one line each."""
        entries = list(self._entries)[-num_events:]
        first = self._num_events - len(entries) + 1
        lines = [f"The last {len(entries)} of {self._num_events} events of the epoch's state:"]
        for number, (event, commands) in enumerate(entries, first):
            followed = "; ".join(_text(command) for command in commands)
            lines.append(f"{number} {_text(event)}{' -> ' if followed else ''}{followed}")
        return "\n".join(lines)


def _kept(item: Event | Command) -> Any:
    """Return the kept form of an event or a command: itself, or its type and some fields."""
    kept = _KEPT.get(type(item))
    return item if kept is None else kept[1](item)


def _text(kept: object) -> str:
    if not isinstance(kept, tuple):
        return repr(kept)
    kind, *values = kept
    fields = zip(_KEPT[kind][0], values, strict=True)
    return f"{kind.__name__}({', '.join(f'{name}={value}' for name, value in fields)})"
