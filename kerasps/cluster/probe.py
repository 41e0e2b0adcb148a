"""Asks once whether a server listens at an address, and tells refusal from silence."""

from __future__ import annotations

import errno
import os
import socket

from kerasps.cluster.description import split_address


def connection_error(address: str, timeout_s: float) -> OSError | None:
    """Return the error that connecting to an address ends in, None where a server accepts.

    A `ConnectionRefusedError` says that the machine is there, and that nobody listens. Any other
    error leaves that open: the machine or the network between may be silent for a while.

    Args:
        address: the `"host:port"` to connect to.
        timeout_s: the time limit in seconds.
    """
    try:
        with socket.create_connection(split_address(address), timeout=timeout_s) as connection:
            if is_connected_to_itself(connection):
                return ConnectionRefusedError(
                    errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED), address
                )
    except OSError as exc:
        return exc
    return None


def is_connected_to_itself(connection: socket.socket) -> bool:
    """Return whether a socket talks to itself.

    Linux picks the port that a connection leaves from. Where it happens to pick the very port that
    is asked for, the socket is connected to itself, with no server anywhere.
    """
    return bool(connection.getsockname() == connection.getpeername())
