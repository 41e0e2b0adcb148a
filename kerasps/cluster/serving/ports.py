"""Reserves free ports of the loopback for servers of TensorFlow, and checks given ones."""

from __future__ import annotations

import errno
import socket

from kerasps.errors import TaskStartError
from kerasps.runtime.addresses import split_address

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


def check_port(address: str, listens_on: str | None, task: tuple[str, int]) -> None:
    """Raise `TaskStartError` if no server can listen at the port of `address`.

    TensorFlow's error names neither the port nor the reason.
    """
    # The address is numeric, so this makes no query.
    family, kind, _, _, place = socket.getaddrinfo(
        listens_on or "0.0.0.0", split_address(address)[1], type=socket.SOCK_STREAM
    )[0]
    with socket.socket(family, kind) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(place)
        except OSError as exc:
            raise no_server(
                address,
                exc.strerror or str(exc),
                task,
                in_use=exc.errno == errno.EADDRINUSE,
            ) from exc


def no_server(
    address: str, reason: str, task: tuple[str, int], *, in_use: bool = False
) -> TaskStartError:
    """Return the error for a server that cannot start in the process of a script."""
    port = split_address(address)[1]
    task_type, task_index = task
    name = "the chief" if task_type == "chief" else f"{task_type} {task_index}"
    if in_use:
        what = f"The port of {name}, {address}, is in use by another process"
        fix = (
            f"`ss -ltnp 'sport = :{port}'` or `lsof -i :{port}` shows which process uses it, such "
            "as an earlier run of this script or another notebook. End that process, or give "
            f"{name} another port in the cluster's description; then make the strategy again."
        )
    else:
        what = f"The server of {name}, at {address}, could not start"
        fix = f"Give {name} another port in the cluster's description, and make the strategy again."
    return TaskStartError(
        f"{what}. Expected: a port on which this process can listen: it serves the workers and ps. "
        f"Received: {reason}. {fix}",
        task_type=task_type,
        task_index=task_index,
    )
