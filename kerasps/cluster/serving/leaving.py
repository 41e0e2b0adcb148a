"""Lets a worker that gets SIGTERM finish its work before it ends.

From then on the worker refuses new connections, and keeps those that it has. The coordinator, which
polls every task, detects that. It gives the worker no new steps and fetches its results. Then it
tells the worker to end, by renaming its process: TensorFlow's operation that writes a file on the
worker's machine can write the name of the worker's process.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time

from kerasps.cluster.serving.renewal import connections_to
from kerasps.runtime.open_sockets import listening_sockets

# The name of a process that may end. The kernel keeps 15 bytes of a name.
MAY_END = "kerasps-let-go"
NAME_FILE = "/proc/self/comm"
# Enough to finish long executions; most schedulers kill after 30 s.
GRACE_S = 25.0
_POLL_S = 0.05
# The time between two reads of the connections, which take longer than reading the name.
_LOOK_S = 0.5


def can_leave() -> bool:
    """Return whether this system supports leaving in this way; Linux does."""
    return os.path.exists(NAME_FILE)


def wait_until_free(port: int) -> None:
    """Refuse new connections at `port`; return when the process may end.

    It may when the coordinator tells it to, when nobody is connected, or after 25 seconds.
    """
    if not connections_to(port):
        return
    deadline = time.monotonic() + GRACE_S
    stop_listening(port)
    look_at = 0.0
    while time.monotonic() < deadline:
        if time.monotonic() >= look_at:
            look_at = time.monotonic() + _LOOK_S
            if not connections_to(port):
                return
        with open(NAME_FILE) as file:
            if file.read().strip() == MAY_END:
                return
        time.sleep(_POLL_S)


def stop_listening(port: int) -> None:
    """Make this process refuse new connections at `port`, and keep the existing ones."""
    for listener in listening_sockets(port):
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
