"""Finds the processes that hold a listening socket of this machine.

A process that a coordinator forked, such as a data loader, inherits the server's socket and may
outlive the coordinator. While it runs, no other process can listen there. A program that the
coordinator started inherits no socket.
"""

from __future__ import annotations

import os
from pathlib import Path

_PROC = Path("/proc")
# The state's number in the kernel's tables.
_LISTENING = "0A"


def processes_listening_on(port: int) -> list[int]:
    """Return the ids of this user's other processes that hold a listening socket.

    Return none if the system does not list sockets; Linux does.

    Args:
        port: the port on which the sockets listen.
    """
    sockets = {f"socket:[{inode}]" for inode in _listening_sockets(port)}
    if not sockets:
        return []
    pids = (int(entry.name) for entry in _PROC.iterdir() if entry.name.isdecimal())
    return [pid for pid in pids if pid != os.getpid() and _holds_one(pid, sockets)]


def _listening_sockets(port: int) -> set[str]:
    """Return the inodes of the sockets that listen on a port, at any address."""
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
        # It has ended meanwhile, or belongs to another user.
        return False
