"""Reserves the port of a task while the task's process restarts.

The server's socket is closed when the process restarts, and the next server listens about half a
second later. Another process could take the port in between. So a second socket is bound to the
same address before, and stays open in the restarted process. It never listens: a client that
connects meanwhile is refused at once, and tries again.

Sockets share an address if all of them have SO_REUSEPORT and belong to one user. A server of
TensorFlow does not set that option. kerasps sets it when the server binds (`bind`), and clears it
as soon as the server listens. Otherwise another server of the same user could take a part of its
connections.
"""

from __future__ import annotations

import contextlib
import os
import socket

from kerasps.runtime.open_sockets import listening_sockets

# Passes the file descriptors of the sockets that hold the port to the restarted process.
_VARIABLE = "KERASPS_HELD_SOCKETS"


class HeldPort:
    """The sockets that reserve a port for a server of this process."""

    def __init__(self, port: int, sockets: list[socket.socket]) -> None:
        self._port = port
        self._sockets = sockets

    def __bool__(self) -> bool:
        """Return whether any socket reserves the port."""
        return bool(self._sockets)

    def close(self) -> None:
        """End the reservation: the port belongs to the server that listens on it, or is free."""
        if not self._sockets:
            return
        for listener in listening_sockets(self._port):
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 0)
        for held in self._sockets:
            held.close()
        self._sockets = []


def hold(port: int) -> None:
    """Reserve a port on which this process listens, until it has restarted and listens there.

    If the system does not allow that, the port is free meanwhile. Call just before `os.execv`.
    """
    held = []
    for listener in listening_sockets(port):
        with contextlib.suppress(OSError):
            held.append(_bound_beside(listener).detach())
    os.environ[_VARIABLE] = ",".join(map(str, held))


def taken_over(port: int) -> HeldPort:
    """Return the sockets with which this process reserved the port before it restarted.

    A second call returns none.
    """
    sockets = []
    for number in os.environ.pop(_VARIABLE, "").split(","):
        with contextlib.suppress(OSError, ValueError):
            held = socket.socket(fileno=int(number))
            if held.getsockname()[1] == port:
                held.set_inheritable(False)
                sockets.append(held)
            else:
                held.detach()
    return HeldPort(port, sockets)


def share(descriptor: int) -> None:
    """Allow a socket, before it is bound, to share the address of the sockets that reserve it."""
    with socket.socket(fileno=os.dup(descriptor)) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)


def _bound_beside(listener: socket.socket) -> socket.socket:
    """Return a socket bound to the address of one that listens; `os.execv` leaves it open."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    held = socket.socket(listener.family, listener.type)
    try:
        if listener.family == socket.AF_INET6:
            is_ipv6_only = listener.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY)
            held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, is_ipv6_only)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        # Needed while connections to this port are still open. Cleared after the bind, else any
        # server that sets the option, as most do, could listen on the port of this socket.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(listener.getsockname())
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        held.set_inheritable(True)
    except BaseException:
        held.close()
        raise
    return held
