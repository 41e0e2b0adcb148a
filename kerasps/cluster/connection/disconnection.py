"""Disconnects this process from the tasks of a cluster that is closed while the process continues.

TensorFlow registers every function that a process traces with all tasks that the process knows, and
prints an error for each task that has ended. So the process forgets the tasks while they still run:
TensorFlow then ends its context on each of them. Afterwards this process has no cluster, and a call
to a task fails at once, in this process.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

from kerasps.cluster.connection.connect import forget_tasks, known_tasks
from kerasps.runtime.probe import Answer, ask_servers

# A running task answers within milliseconds, even if it is busy.
_ANSWER_S = 1.0
_LIMIT_S = 5.0


def disconnect(addresses: Mapping[tuple[str, int], str]) -> None:
    """Make this process forget all tasks. Do nothing if it is connected to none of these.

    Call before the tasks end. This usually takes milliseconds, and at most five seconds.
    """
    if not known_tasks() & set(addresses.values()):
        return
    # In a thread, since TensorFlow waits for each task.
    thread = threading.Thread(target=forget_tasks, name="kerasps-leave", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # Python starts no thread while it ends, from 3.12 on
        answers = ask_servers(addresses, _ANSWER_S).values()
        if all(answer is Answer.SERVES for answer in answers):
            forget_tasks()
    else:
        thread.join(_LIMIT_S)
