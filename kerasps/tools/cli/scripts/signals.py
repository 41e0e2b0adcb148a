"""Receives the launcher's signals, and selects those to pass on to the script."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from types import FrameType

# Ctrl-C in a terminal reaches the script directly; a SIGINT that was sent only to the launcher does
# not. They look alike, and a second SIGINT would interrupt the script's reaction to the first one.
# So the launcher waits this long before it passes a SIGINT on.
_INTERRUPT_GRACE_S = 5.0
FORWARDED = (signal.SIGTERM, signal.SIGHUP)


class EndedBySignal(BaseException):
    """Raised by a signal that arrives before the script runs."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def end_with(number: int, frame: FrameType | None) -> None:
    """Handle a signal by raising `EndedBySignal`."""
    raise EndedBySignal(number)


@contextlib.contextmanager
def signal_handlers(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Set `handler`, in this context, for the signals that end a process."""
    before = {}
    for number in (signal.SIGINT, *FORWARDED):
        # An ignored signal stays ignored, such as SIGHUP under nohup.
        if signal.getsignal(number) != signal.SIG_IGN:
            before[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


class Signals:
    """The signals that the launcher receives, and those that it passes on to the script.

    Args:
        received: all received signals, in order; the list grows.
    """

    def __init__(self, received: list[signal.Signals]) -> None:
        self._received = received
        self._seen = 0
        self._interrupted_at: float | None = None

    def new(self) -> list[signal.Signals]:
        """Return the signals received since the last call."""
        new = self._received[self._seen :]
        self._seen += len(new)
        if signal.SIGINT in new and self._interrupted_at is None:
            self._interrupted_at = time.monotonic()
        return new

    def to_pass_on(self, new: Iterable[signal.Signals]) -> list[signal.Signals]:
        """Return the signals to pass on to the script now."""
        due = [number for number in new if number in FORWARDED]
        return [*due, signal.SIGINT] if self._is_interrupt_due() else due

    def _is_interrupt_due(self) -> bool:
        """Return True, once, when the launcher has to pass a SIGINT on to the script."""
        if (
            self._interrupted_at is None
            or time.monotonic() - self._interrupted_at <= _INTERRUPT_GRACE_S
            or _in_foreground()
        ):
            return False
        self._interrupted_at = float("inf")
        return True


def _in_foreground() -> bool:
    """Return True if Ctrl-C in a terminal reaches this process.

    It then reaches the script too, which is in the same process group.
    """
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)
