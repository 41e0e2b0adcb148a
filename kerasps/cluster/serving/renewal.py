"""Notices in a served task that its coordinator has ended, and starts the task's process anew.

A coordinator that ends as it should takes its variables, functions and iterators off the tasks; the
memory that they took comes back to the system with the new beginning. One that was killed leaves
them. TensorFlow then keeps them for ten minutes, in which the next coordinator may find no room for
its own tables. Nor can that one ask for them: nobody else knows under which number TensorFlow keeps
them. So the task, which can use them no more, lets its whole process begin again.

The task must be sure, since a ps holds the only copy of its variables. A process that is asleep,
stopped or out of reach still has its sockets. So two things must come together. A connection to
this task is closed. And the coordinator's machine refuses connections at the port on which the
coordinator listens for as long as it lives. Where a machine vanishes as a whole, nobody refuses,
and TensorFlow's ten minutes are what remains.
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

# How often the task looks at its connections, in milliseconds. A script takes longer to import
# TensorFlow, so a coordinator that is started again at once does not find the task that is about to
# leave. A look reads two tables of the kernel, which list every socket of the machine or container:
# 14 ms of processor time with 20 sockets there, 22 ms with 2,000, which is 3 to 4% of a core. To
# look more rarely saves little, and lets a new coordinator meet the old task.
POLL_MS = 500
# What was read so recently is not read again: well below the time between two looks.
_SAME_LOOK_S = 0.1
# When the connections to a port were read last, and which there were.
_LAST_LOOK: dict[int, tuple[float, set[str]]] = {}
# For so many looks after a connection was closed: a process that is killed closes its sockets one
# by one.
_LOOKS = 4
# A machine that refuses does so within a round trip.
_PROBE_TIMEOUT_S = 1.0
# Two refusals this far apart: a coordinator that renews its listening socket is not gone.
_BETWEEN_PROBES_S = 0.1
_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
# The kernel's number of the state, as these tables write it.
_ESTABLISHED = "01"


class End(Protocol):
    """The condition on which a served task ends."""

    exit_code: int | None

    def is_over(self) -> bool:
        """Return whether the task may end, with `exit_code`. Call every `POLL_MS`."""
        ...


class CoordinatorWatch:
    """Polls whether the coordinator that this task served has ended.

    Args:
        port: the port of this task.
        coordinator: the `"host:port"` of the coordinator.
    """

    def __init__(self, port: int, coordinator: str) -> None:
        self._port = port
        self._coordinator = coordinator
        self._seen: set[str] = set()
        self.exit_code: int | None = None
        self._was_there = False
        self._looks_left = 0

    def is_over(self) -> bool:
        """Return whether the coordinator was there and has ended. Call every `POLL_MS`."""
        now = last_connections_to(self._port)
        if now and not self._was_there:
            # Whoever connected first need not be the coordinator: `kerasps env` does so too.
            self._was_there = connection_error(self._coordinator, _PROBE_TIMEOUT_S) is None
        if self._seen - now:
            self._looks_left = _LOOKS
        self._seen = now
        if not self._was_there or self._looks_left == 0:
            return False
        self._looks_left -= 1
        return self._is_refused() and self._is_refused()

    def _is_refused(self) -> bool:
        # Only a refusal counts. A machine that is silent may have a coordinator that sleeps.
        error = connection_error(self._coordinator, _PROBE_TIMEOUT_S)
        if not isinstance(error, ConnectionRefusedError):
            return False
        time.sleep(_BETWEEN_PROBES_S)
        return True


class AfterTheEnd:
    """Polls whether something is over and nobody is connected any more.

    Args:
        address: the `"host:port"` of this task.
        has_come: returns whether it is over.
        linger_s: how many seconds after that the connections are waited for at most.
    """

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
    """Return what `connections_to` does, as it was a moment ago.

    The watches of a task look one after the other, and share what one of them has read.
    """
    now = time.monotonic()
    looked_at, found = _LAST_LOOK.get(port, (-_SAME_LOOK_S, set()))
    if now - looked_at >= _SAME_LOOK_S:
        found = connections_to(port)
        _LAST_LOOK[port] = now, found
    return found


def connections_to(port: int) -> set[str]:
    """Return the other ends of the established connections to a port of this machine."""
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


def start_anew(port: int) -> NoReturn:
    """Restart this process, with the same arguments, environment and process id.

    Args:
        port: the port that it listens on, and which nobody else can take meanwhile.
    """
    held_port.hold(port)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
