"""Waits for the reports of an epoch, and tells users why none comes."""

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
from kerasps.training.contract.preemption import ends_soon
from kerasps.training.epoch.epoch_events import Report
from kerasps.training.sessions.channel import EpochChannel
from kerasps.variables.lanes.flights import worker_timeout

_LOGGER = logging.getLogger("kerasps")

# The interval at which a wait checks for failures; results end the wait at once.
_POLL_S = 0.1
_WARN_AFTER_S = 10.0
# If executions are in flight and no result comes for this long, a line names them; the next line
# follows after twice the time.
_SAY_AFTER_S = 30.0
# A preempted machine ends within 30 s, of which noticing that a worker is silent takes 11.
_PREEMPTED_S = 5.0


class ReportWait:
    """Waits for the next report of an epoch's state.

    While all workers are lost it warns once, and ends in an error after KERASPS_WORKER_TIMEOUT
    seconds. While workers answer and none reports, it logs which executions are in flight, and
    where. Thread: `fit`'s.
    """

    def __init__(self, channel: EpochChannel, membership: Membership) -> None:
        self._channel = channel
        self._membership = membership
        self._timeout = worker_timeout()

    def next(self, look: Callable[[], None]) -> Report:
        """Return the next report.

        Args:
            look: called repeatedly while there is none. An error that it raises ends the wait.

        Raises WorkerLostError if no worker has answered for KERASPS_WORKER_TIMEOUT seconds (600),
        or for 5 if the process is about to be preempted.
        """
        began = waiting_since = time.monotonic()
        has_warned = False
        say_after = _SAY_AFTER_S
        while True:
            with contextlib.suppress(queue.Empty):
                return self._channel.reports.get(timeout=_POLL_S)
            look()
            lost = self._channel.lost_workers | self._membership.absent_workers
            # No result can come while all workers are lost.
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
            if waited > (min(self._timeout, _PREEMPTED_S) if ends_soon() else self._timeout):
                tell_supervisor("lost", "worker", min(lost))
                raise WorkerLostError(self._waiting_text(waited))

    def _waiting_text(self, waited: float) -> str:
        lost = self._channel.lost_workers | self._membership.absent_workers
        gone = ", ".join(f"worker {i}" for i in sorted(lost))
        return (
            f"No worker has taken a step for {waited:.0f} s. Expected: at least one worker that "
            f"answers within {self._timeout:.0f} s. Received: no answer from {gone}. Restart a "
            "worker at its address (the training then resumes), or set KERASPS_WORKER_TIMEOUT to "
            "wait longer."
        )

    def _out_text(self, waited: float) -> str:
        out = "; ".join(
            f"{self._membership.name_of(worker)}: {len(executions)} executions of "
            f"{sum(e.num_steps for e in executions)} steps"
            for worker, executions in self._channel.running.items()
        )
        return (
            f"No result has come for {waited:.0f} s. In flight: {out or 'a fetch of results'}. All "
            "tasks answer, so these steps may just be long, or wait for something."
        )
