"""How a served task notices that its coordinator was killed, and starts itself anew.

A coordinator that ends as it should takes its variables, functions and iterators off the tasks. One
that was killed leaves them, and TensorFlow keeps them for ten minutes, in which the next
coordinator may find no room for its own tables. It cannot ask for them either: nobody else knows
under which number TensorFlow keeps them. So the task, which can use them no more, lets its whole
process begin again.

It must be sure, since a ps holds the only copy of its variables. A process that is asleep, stopped
or out of reach still has its sockets, so two things must come together: a connection to this task
is closed, and the machine of the coordinator refuses connections at the port on which the
coordinator listens for as long as it lives. Where a machine vanishes as a whole, nobody refuses,
and TensorFlow's ten minutes are what remains.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path
from typing import NoReturn

from kerasps.cluster import split_address

# How often the task looks at its connections, in milliseconds. A script takes longer to import
# TensorFlow, so a coordinator that is started again at once does not find the task that is about to
# leave.
POLL_MS = 500
# For so many looks after a connection was closed: a process that is killed closes its sockets one by one.
_LOOKS = 4
_ANSWER_S = 1.0
_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_ESTABLISHED = "01"


class CoordinatorWatch:
    """Looks, time and again, whether the coordinator that this task served is gone.

    Args:
        port: the port of this task.
        coordinator: the address of the coordinator, `"host:port"`.
    """

    def __init__(self, port: int, coordinator: str) -> None:
        self._port = port
        self._coordinator = coordinator
        self._seen: set[str] = set()
        self._was_there = False
        self._looks_left = 0

    def is_over(self) -> bool:
        """Whether the coordinator was there and is gone. Call every POLL_MS."""
        now = connections_to(self._port)
        if now and not self._was_there:
            self._was_there = self._answer() == "listens"
        if self._seen - now:
            self._looks_left = _LOOKS
        self._seen = now
        if not self._was_there or self._looks_left == 0:
            return False
        self._looks_left -= 1
        return self._answer() == "refuses" and self._answer() == "refuses"

    def _answer(self) -> str:
        host, port = split_address(self._coordinator)
        try:
            socket.create_connection((host, port), timeout=_ANSWER_S).close()
        except ConnectionRefusedError:
            time.sleep(0.1)
            return "refuses"
        except OSError:
            return "does not answer"
        return "listens"


def can_watch() -> bool:
    """Whether this system says which connections there are."""
    return _TABLES[0].exists()


def connections_to(port: int) -> set[str]:
    """The other ends of the established connections to a port of this machine."""
    found = set()
    for table in _TABLES:
        try:
            lines = table.read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            _, local, remote, state, *_ = line.split()
            if state == _ESTABLISHED and int(local.rpartition(":")[2], 16) == port:
                found.add(remote)
    return found


def start_anew() -> NoReturn:
    """Lets this process begin again, with the same arguments, environment and process id."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
