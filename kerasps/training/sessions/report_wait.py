"""Waits for the reports of an epoch, and says why none comes."""

from __future__ import annotations

import contextlib
import logging
import queue
import time
import warnings
from collections.abc import Callable

from kerasps.cluster.members.membership import Membership
from kerasps.errors import WorkerLostError
from kerasps.runtime.supervision import tell_supervisor
from kerasps.training.epoch.epoch_events import Report
from kerasps.training.sessions.channel import EpochChannel
from kerasps.variables.flights import worker_timeout

_LOGGER = logging.getLogger("kerasps")

# How often a wait looks whether something has failed; only failures wait for it, results do not.
_POLL_S = 0.1
_WARN_AFTER_S = 10.0
# When nothing has come back for so long though something is out, one line says what; the next says
# it after twice the time.
_SAY_AFTER_S = 30.0


class ReportWait:
    """Waits for the next report of an epoch's state.

    While all workers are gone it warns once, and ends in an error after the time that a worker may
    be silent. While workers are there and none reports, it logs which executions are out, and
    where. Thread: `fit`'s.

    Args:
        channel: brings the reports.
        membership: knows who is there.
    """

    def __init__(self, channel: EpochChannel, membership: Membership) -> None:
        self._channel = channel
        self._membership = membership
        self._timeout = worker_timeout()

    def next(self, look: Callable[[], None]) -> Report:
        """Return the next report.

        Args:
            look: called again and again while there is none. What it raises ends the wait.

        Raises:
            WorkerLostError: no worker has been there for KERASPS_WORKER_TIMEOUT seconds (600).
        """
        began = waiting_since = time.monotonic()
        has_warned = False
        say_after = _SAY_AFTER_S
        while True:
            with contextlib.suppress(queue.Empty):
                return self._channel.reports.get(timeout=_POLL_S)
            look()
            lost = self._channel.lost_workers | self._membership.absent_workers
            # Nothing can come while all workers are gone.
            if len(lost) < self._membership.num_workers:
                waiting_since = time.monotonic()
                if waiting_since - began > say_after:
                    say_after *= 2
                    _LOGGER.warning(self._out_text(waiting_since - began))
                    if _LOGGER.isEnabledFor(logging.DEBUG):  # the text is long
                        _LOGGER.debug(self._channel.history())
                continue
            waited = time.monotonic() - waiting_since
            if waited > _WARN_AFTER_S and not has_warned:
                has_warned = True
                warnings.warn(self._waiting_text(waited), stacklevel=2)
            if waited > self._timeout:
                tell_supervisor("lost", "worker", min(lost))
                raise WorkerLostError(self._waiting_text(waited))

    def _waiting_text(self, waited: float) -> str:
        lost = self._channel.lost_workers | self._membership.absent_workers
        gone = ", ".join(f"worker {i}" for i in sorted(lost))
        return (
            f"No worker has taken a step for {waited:.0f} s: {gone} went away and did not come "
            f"back. Expected: at least one worker that answers within {self._timeout:.0f} s. "
            "Restart a worker at its address (it goes on by itself), or set KERASPS_WORKER_TIMEOUT "
            "to wait longer."
        )

    def _out_text(self, waited: float) -> str:
        out = "; ".join(
            f"{self._membership.name_of(worker)}: {len(executions)} executions of "
            f"{sum(e.num_steps for e in executions)} steps"
            for worker, executions in self._channel.running.items()
        )
        return (
            f"Nothing has come back for {waited:.0f} s. Out: {out or 'what workers hold'}. All "
            "tasks answer, so these steps may just be long, or wait for something."
        )
