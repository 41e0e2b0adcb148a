"""Free ports of the loopback, reserved for servers of TensorFlow."""

from __future__ import annotations

import socket

HOST = "127.0.0.1"


def reserve_port() -> socket.socket:
    """Pick a free port, and keep it from everyone but the server that is told it.

    Linux lets two sockets with SO_REUSEADDR share a port while neither listens. TensorFlow's server
    sets that option. So a socket that is bound and never listens leaves the port to the server. It
    keeps the port from everyone who asks for a free one, before the server starts and while a
    killed one is being restarted.

    Returns:
        The socket. To close it frees the port.
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
