"""Finds the sockets of this process, those of TensorFlow's server and connections too.

A task's server imports it, so it reads `/proc` itself: psutil would take longer to import than the
rest of the server's Python.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

_DESCRIPTORS = "/proc/self/fd"


def open_sockets() -> Iterator[socket.socket]:
    """Yield a duplicate of each socket of this process, and close it at the next one.

    Yield none if the system does not list the descriptors of a process; Linux does.
    """
    try:
        names = os.listdir(_DESCRIPTORS)
    except OSError:
        return
    for name in names:
        try:
            if not os.readlink(f"{_DESCRIPTORS}/{name}").startswith("socket:"):
                continue
            duplicate = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue  # closed meanwhile
        with duplicate:
            yield duplicate


def listening_sockets(port: int) -> Iterator[socket.socket]:
    """Yield, as `open_sockets` does, a duplicate of each socket that listens on a port."""
    for found in open_sockets():
        if (
            found.family in (socket.AF_INET, socket.AF_INET6)
            and found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            and found.getsockname()[1] == port
        ):
            yield found
