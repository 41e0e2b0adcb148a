"""Updates TensorFlow's cluster when workers become available again."""

from __future__ import annotations

import logging
import time

import tensorflow as tf

from kerasps.cluster.connection.connect import update_tasks
from kerasps.cluster.members.shared_presence import SharedPresence
from kerasps.runtime.probe import ANSWER_S, Answer, ask_servers

_LOGGER = logging.getLogger("kerasps")

# The pause after a failed update, which usually fails because a worker died meanwhile.
_PAUSE_S = 0.5


class ClusterUpdates:
    """Puts workers that answer again back into TensorFlow's cluster.

    When its cluster changes, TensorFlow calls each member and waits for the answer. So the same
    update removes unavailable workers, and there is one update at a time. Thread: a separate one,
    which calls `run`.
    """

    def __init__(self, shared: SharedPresence) -> None:
        self._shared = shared

    def run(self) -> None:
        """Update the cluster when an update is due, until the watch has stopped."""
        shared = self._shared
        while not shared.has_stopped:
            shared.is_update_due.wait()
            shared.is_update_due.clear()
            while not shared.has_stopped and self._is_anyone_back():
                if not self._try_to_update():
                    time.sleep(_PAUSE_S)

    def _is_anyone_back(self) -> bool:
        with self._shared.lock:
            # Without a ps no step can run, and TensorFlow would wait for the ps.
            if not self._shared.presence.has_all_ps:
                return False
            return bool(self._shared.presence.back)

    def _try_to_update(self) -> bool:
        """Update TensorFlow's cluster; return whether it succeeded."""
        shared = self._shared
        with shared.lock:
            members = {**shared.presence.connected, **shared.presence.back}
        answers = ask_servers(members, ANSWER_S)
        with shared.changed:
            noticed = shared.presence.count_silent_as_hung(answers, time.monotonic())
            silent = {one.task for one in noticed}
            back = [
                task
                for task in shared.presence.back
                if answers.get(task) is Answer.SERVES and task in members
            ]
            kept = {
                task: address
                for task, address in shared.presence.connected.items()
                if task not in silent
            }
        shared.follow(noticed)
        members = {**kept, **{task: members[task] for task in back}}
        try:
            update_tasks(members)
        except tf.errors.OpError as exc:
            _LOGGER.debug("TensorFlow did not take workers back.", exc_info=exc)
            return False
        shared.change(lambda presence, now: presence.mark_connected(back, now))
        return True
