"""Lets a worker that gets SIGTERM finish its work before it ends.

The worker takes no new connections from then on, and keeps those that it has. That is how the
coordinator, which asks every task time and again whether it is there, learns of it: it gives the
worker nothing new and fetches what the worker holds. Then it tells the worker to go, by a name: the
operation that writes a file on a worker's machine can write the name of the worker's own process.
"""

from __future__ import annotations

import os
import socket
import time

from kerasps.cluster.serving.renewal import connections_to

# The name that a process is given which may go. The kernel keeps 15 bytes of one.
LET_GO = "kerasps-let-go"
NAME_FILE = "/proc/self/comm"
# As long as it takes to finish long executions; schedulers kill after 30 s, mostly.
GRACE_S = 25.0
_POLL_S = 0.05
# How often connections are looked at, which takes longer than to look at a name.
_LOOK_S = 0.5


def can_leave() -> bool:
    """Return whether this system lets a process leave so; Linux does."""
    return os.path.exists(NAME_FILE)


def leave(port: int) -> None:
    """Take no new connections at `port`; return when the process may go.

    That is when the coordinator has said so, when nobody is connected, and at last after a time.
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
            if file.read().strip() == LET_GO:
                return
        time.sleep(_POLL_S)


def stop_listening(port: int) -> None:
    """Make this process refuse new connections at `port`, and keep those that it has."""
    for number in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(number))) as listener:
                is_listening = listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                if is_listening and listener.getsockname()[1] == port:
                    listener.shutdown(socket.SHUT_RDWR)
        except OSError:  # closed meanwhile, or of another kind
            continue
