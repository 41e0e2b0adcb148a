"""Detects in a served task that its coordinator has ended, and restarts the task's process.

A coordinator that ends normally removes its variables, functions and iterators from the tasks; the
restart then returns their memory to the system. A killed coordinator leaves them. TensorFlow keeps
them for ten minutes, in which the next coordinator may find no room for its tables. The next
coordinator cannot free them either, because it does not know the number under which TensorFlow
keeps them. So the task, which has no use for them, restarts its whole process.

The task must be certain, since a ps has the only copy of its variables. A process that is
suspended, stopped or unreachable still has its sockets. So two conditions must hold: a connection
to this task was closed, and the coordinator's machine refuses connections at the port on which the
coordinator listens all its life. If a whole machine disappears, nothing refuses, and TensorFlow
frees the memory after its ten minutes.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, Protocol

from kerasps.cluster.serving import held_port
from kerasps.runtime.addresses import split_address
from kerasps.runtime.probe import connection_error

# The time between two polls of the task's connections, in milliseconds. A script takes longer to
# import TensorFlow, so a coordinator that is restarted at once does not meet the old process. A
# poll reads two tables of the kernel, which list every socket of the machine or container: 14 ms of
# processor time with 20 sockets, 22 ms with 2,000, which is 3 to 4% of a core. Fewer polls would
# save little, and a new coordinator could meet the old process.
POLL_MS = 500
# A result that is not older is reused: well below the time between two polls.
_SAME_LOOK_S = 0.1
# The time of the last read of the connections to a port, and its result.
_LAST_LOOK: dict[int, tuple[float, set[str]]] = {}
# Probe the coordinator in so many polls after a connection was closed: a killed process closes its
# sockets one by one.
_LOOKS = 4
# A machine that refuses does so within a round trip.
_PROBE_TIMEOUT_S = 1.0
# Two refusals this far apart are needed: a coordinator may reopen its listening socket.
_BETWEEN_PROBES_S = 0.1
_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
# The state's number in these tables.
_ESTABLISHED = "01"


class End(Protocol):
    """The condition on which a served task ends."""

    exit_code: int | None

    def is_over(self) -> bool:
        """Return whether the task may end, with `exit_code`. Call every `POLL_MS`."""
        ...


class CoordinatorWatch:
    """Detects that the coordinator of this task has ended."""

    def __init__(self, port: int, coordinator: str) -> None:
        self._port = port
        self._coordinator = coordinator
        self._seen: set[str] = set()
        self.exit_code: int | None = None
        self._was_there = False
        self._looks_left = 0

    def is_over(self) -> bool:
        """Return whether the coordinator was connected and has ended. Call every `POLL_MS`."""
        now = last_connections_to(self._port)
        if now and not self._was_there:
            # The first connection need not be the coordinator's: `kerasps env` connects too.
            self._was_there = connection_error(self._coordinator, _PROBE_TIMEOUT_S) is None
        if self._seen - now:
            self._looks_left = _LOOKS
        self._seen = now
        if not self._was_there or self._looks_left == 0:
            return False
        self._looks_left -= 1
        return self._is_refused() and self._is_refused()

    def _is_refused(self) -> bool:
        # Only a refusal counts. If the machine does not answer, its coordinator may be suspended.
        error = connection_error(self._coordinator, _PROBE_TIMEOUT_S)
        if not isinstance(error, ConnectionRefusedError):
            return False
        time.sleep(_BETWEEN_PROBES_S)
        return True


class AfterTheEnd:
    """Ends a task when an event has happened and nobody is connected to the task any more."""

    def __init__(self, address: str, has_come: Callable[[], bool], *, linger_s: float) -> None:
        self._port = split_address(address)[1]
        self._has_come = has_come
        self._linger_s = linger_s
        self._since: float | None = None
        self.exit_code: int | None = None

    def is_over(self) -> bool:
        """Return whether the task may end. Call every `POLL_MS`."""
        if self._since is None:
            if not self._has_come():
                return False
            self._since = time.monotonic()
        if can_watch() and not connections_to(self._port):
            return True
        return time.monotonic() - self._since > self._linger_s


def can_watch() -> bool:
    """Return whether this system lists its connections; Linux does."""
    return _TABLES[0].exists()


def last_connections_to(port: int) -> set[str]:
    """Return the result of `connections_to`, at most 0.1 seconds old.

    The watches of a task poll one after the other, and share the result of one read.
    """
    now = time.monotonic()
    looked_at, found = _LAST_LOOK.get(port, (-_SAME_LOOK_S, set()))
    if now - looked_at >= _SAME_LOOK_S:
        found = connections_to(port)
        _LAST_LOOK[port] = now, found
    return found


def connections_to(port: int) -> set[str]:
    """Return the remote addresses of the established connections to a port of this machine."""
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


def restart_process(port: int) -> NoReturn:
    """Restart this process, with the same arguments, environment and process id."""
    held_port.hold(port)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
