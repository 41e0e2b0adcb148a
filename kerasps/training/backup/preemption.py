"""SIGTERM to the coordinator while `fit` runs: its machine is about to be taken away."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

# What a shell reports of a process that SIGTERM has ended.
EXIT_CODE = 128 + signal.SIGTERM


class Preempted(BaseException):
    """Ends what need not be finished when a notice was given. Only `fit` may catch it."""


class PreemptionNotice:
    """Takes note of SIGTERM, so that `fit` can answer it at a point where nothing is cut in two.

    A handler of the user's own is called when `fit` has made its backup, and decides what follows.
    Where SIGTERM is ignored, or `fit` runs in another thread than the main one, nothing changes.
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
        """Take note of SIGTERM from here on."""
        if threading.current_thread() is not threading.main_thread():
            return
        previous = signal.getsignal(signal.SIGTERM)
        # None: a handler that was not set by Python, which it cannot call.
        if previous is None or previous == signal.SIG_IGN:
            return
        self._previous = previous
        signal.signal(signal.SIGTERM, self._note)
        self._is_installed = True

    def uninstall(self) -> None:
        """Put the handler back that there was before."""
        # Somebody may have set another one meanwhile, which is to stay.
        if self._is_installed and signal.getsignal(signal.SIGTERM) == self._note:
            signal.signal(signal.SIGTERM, self._previous)
        self._is_installed = False

    def answer(self) -> None:
        """Do what SIGTERM asks for.

        Raises:
            SystemExit: nobody has a handler. The code is 143.
        """
        self._is_given = False
        if callable(self._previous):
            self._previous(signal.SIGTERM, None)
        else:
            raise SystemExit(EXIT_CODE)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._is_given = True
