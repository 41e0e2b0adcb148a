"""SIGTERM to the coordinator while `fit` runs, the usual notice of a preempted machine."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

# A shell reports this code of a process that SIGTERM has ended.
EXIT_CODE = 128 + signal.SIGTERM


# The notices that were given and will end the process.
_given: set[PreemptionNotice] = set()


def ends_soon() -> bool:
    """Return True if a notice was given that will end this process. Thread: any."""
    return bool(_given)


class Preempted(BaseException):
    """Ends a validation when a notice was given. Only `fit` may catch it."""


class PreemptionNotice:
    """Notes SIGTERM, so that `fit` can answer it when no step or file is half done.

    A user's handler is called when `fit` has made its backup, and decides how to go on. If SIGTERM
    is ignored, or `fit` does not run in the main thread, this class does nothing.
    """

    def __init__(self) -> None:
        self._previous: Callable[[int, FrameType | None], Any] | int | None = None
        self._is_installed = False
        self._is_given = False

    @property
    def is_given(self) -> bool:
        """True if SIGTERM came and is not yet answered."""
        return self._is_given

    @property
    def ends_process(self) -> bool:
        """True if SIGTERM ends the process, since no other handler is set."""
        return self._previous == signal.SIG_DFL

    def install(self) -> None:
        """Note SIGTERM from now on."""
        if threading.current_thread() is not threading.main_thread():
            return
        previous = signal.getsignal(signal.SIGTERM)
        # None is a handler that Python did not set, and cannot call.
        if previous is None or previous == signal.SIG_IGN:
            return
        self._previous = previous
        signal.signal(signal.SIGTERM, self._note)
        self._is_installed = True

    def uninstall(self) -> None:
        """Restore the previous handler."""
        # Keep a handler that somebody has set meanwhile.
        if self._is_installed and signal.getsignal(signal.SIGTERM) == self._note:
            signal.signal(signal.SIGTERM, self._previous)
        self._is_installed = False
        _given.discard(self)

    def answer(self) -> None:
        """Call the user's handler, or end the process.

        Raises SystemExit if there is no other handler. The code is 143.
        """
        self._is_given = False
        if callable(self._previous):
            self._previous(signal.SIGTERM, None)
        else:
            raise SystemExit(EXIT_CODE)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._is_given = True
        if self.ends_process:
            _given.add(self)
