"""Finds the processes that hold a listening socket of this machine.

A process that a coordinator forked, such as a loader of data, inherits its server's socket, and may
outlive it. While it does, nobody else can listen there. A program that the coordinator started
inherits no socket.
"""

from __future__ import annotations

import os
from pathlib import Path

_PROC = Path("/proc")
# The kernel's number of the state, as its tables write it.
_LISTENING = "0A"


def processes_listening_on(port: int) -> list[int]:
    """Return the ids of this user's processes, but for this one, that hold a listening socket.

    Empty where the system does not tell; Linux does.

    Args:
        port: the port on which the sockets listen.
    """
    sockets = {f"socket:[{inode}]" for inode in _listening_sockets(port)}
    if not sockets:
        return []
    pids = (int(entry.name) for entry in _PROC.iterdir() if entry.name.isdecimal())
    return [pid for pid in pids if pid != os.getpid() and _holds_one(pid, sockets)]


def _listening_sockets(port: int) -> set[str]:
    """Return the inodes of the sockets that listen on a port, at whatever address."""
    inodes = set()
    for table in ("tcp", "tcp6"):
        try:
            lines = (_PROC / "net" / table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == _LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add(fields[9])
    return inodes


def _holds_one(pid: int, sockets: set[str]) -> bool:
    try:
        return any(os.readlink(link) in sockets for link in (_PROC / str(pid) / "fd").iterdir())
    except OSError:
        # It has ended meanwhile, or belongs to somebody else.
        return False
