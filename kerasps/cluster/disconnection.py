"""Disconnects this process from the tasks of a cluster that is closed while the process goes on.

TensorFlow registers every function that a process traces with all tasks that the process knows, and
prints an error for each that is gone. So the process forgets the tasks, while they still run:
TensorFlow then ends its context on each of them. Afterwards this process is one without a cluster,
and a call to a task fails at once, in this process.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
from collections.abc import Iterator, Mapping

from kerasps.cluster.connection import forget_tasks
from kerasps.cluster.probe import Answer, ask_servers

# A task that runs answers within milliseconds, whatever else it does.
_ANSWER_S = 1.0
_LIMIT_S = 5.0
# What TensorFlow prints of a task on which it cannot end its context.
_NOT_ENDED = re.compile(
    rb"Unable to close remote context|^Additional GRPC error information from remote target"
    rb"|^:[A-Z_]+:Error received from peer"
)


def disconnect(addresses: Mapping[tuple[str, int], str]) -> None:
    """Have this process forget all tasks. Does nothing where it is connected to none of these.

    Call before the tasks end. Waits some milliseconds, and never longer than five seconds.

    Args:
        addresses: the `"host:port"` of each task, keyed by (task type, task index).
    """
    answers = ask_servers(addresses, _ANSWER_S).values()
    all_are_there = all(answer is Answer.SERVES for answer in answers)
    with contextlib.nullcontext() if all_are_there else _stderr_without(_NOT_ENDED):
        # In a thread, since TensorFlow waits for each task.
        thread = threading.Thread(
            target=forget_tasks, args=[set(addresses.values())], name="kerasps-leave", daemon=True
        )
        thread.start()
        thread.join(_LIMIT_S)


@contextlib.contextmanager
def _stderr_without(pattern: re.Pattern[bytes]) -> Iterator[None]:
    """In this context, drop the lines of the process's stderr that match; all others go through.

    TensorFlow's C++ code writes to the descriptor, past `sys.stderr`.
    """
    try:
        saved = os.dup(2)
    except OSError:  # the process has no stderr
        yield
        return
    with contextlib.suppress(Exception):
        sys.stderr.flush()
    read_fd, write_fd = os.pipe()
    thread = threading.Thread(target=_pass_on, args=[read_fd, saved, pattern], daemon=True)
    thread.start()
    os.dup2(write_fd, 2)
    os.close(write_fd)
    try:
        yield
    finally:
        with contextlib.suppress(Exception):
            sys.stderr.flush()
        os.dup2(saved, 2)
        # A process that was started meanwhile keeps the pipe, and the thread goes on for it.
        thread.join(_ANSWER_S)


def _pass_on(read_fd: int, write_fd: int, pattern: re.Pattern[bytes]) -> None:
    with open(read_fd, "rb") as source, open(write_fd, "wb", buffering=0) as target:
        for line in source:
            if not pattern.search(line):
                with contextlib.suppress(OSError):
                    target.write(line)
