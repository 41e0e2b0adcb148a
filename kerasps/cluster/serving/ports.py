"""Reserves free ports of the loopback for servers of TensorFlow."""

from __future__ import annotations

import socket

HOST = "127.0.0.1"


def reserve_port() -> socket.socket:
    """Pick a free port, and reserve it for the server that will be given its number.

    Linux lets two sockets with SO_REUSEADDR share a port while neither listens, and TensorFlow's
    server sets that option. So the server can use the port of a socket that is bound and never
    listens. Meanwhile the system gives the port to no other process that asks for a free one:
    before the server starts, and while a killed one restarts.

    Returns:
        The socket. Closing it frees the port.
    """
    port = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        port.bind((HOST, 0))
    except BaseException:
        port.close()
        raise
    return port


def address_of(port: socket.socket) -> str:
    """Return the `"host:port"` of a reserved port."""
    return f"{HOST}:{port.getsockname()[1]}"
