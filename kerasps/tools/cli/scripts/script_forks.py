"""Ends processes that an ended script forked, if they keep its port.

A process that a coordinator forks, such as a data loader, inherits the server's socket and may
outlive the coordinator. While it runs, no other process can listen there. A program that the
coordinator starts inherits no socket.

A process is ended only if it descends from the script, and only if it has such a socket. The mark
says that it descends: a random word in the environment of the script, which its descendants
inherit, also those that have left its session or lost their parent. The port says nothing about
that: programs of others may listen on the same port of other addresses.
"""

from __future__ import annotations

import contextlib
import ipaddress
import secrets
from collections.abc import Iterator

import psutil

_VARIABLE = "KERASPS_SCRIPT_MARK"
# The system frees the socket of a killed process within milliseconds, a large process's within a
# second.
_END_S = 5.0
# A process may fork once more while it is ended.
_ROUNDS = 5


class ScriptForks:
    """The processes that descend from the starts of one script, known by a mark."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._mark = secrets.token_hex(16)

    @property
    def variables(self) -> dict[str, str]:
        """The environment variable that marks the script."""
        return {_VARIABLE: self._mark}

    def end(self, address: str | None) -> list[int]:
        """Kill the descendants that listen on the script's port; return their process ids.

        Call when the script has ended. They cannot reach the cluster, and no process waits for the
        data that they load.
        """
        ended: list[int] = []
        for _ in range(_ROUNDS):
            found = [process for process in self._descendants() if self._keeps(process, address)]
            if not found:
                break
            for process in found:
                # psutil compares the start time, so it kills no process that has got the id since.
                with contextlib.suppress(psutil.Error):
                    process.kill()
            psutil.wait_procs(found, _END_S)
            ended += [process.pid for process in found if process.pid not in ended]
        return ended

    def _descendants(self) -> Iterator[psutil.Process]:
        for process in psutil.process_iter():
            # Another user's process, or one that has ended, has no environment to read.
            with contextlib.suppress(psutil.Error, OSError):
                if process.environ().get(_VARIABLE) == self._mark:
                    yield process

    def _keeps(self, process: psutil.Process, address: str | None) -> bool:
        """Return True if a process has a socket that keeps others from listening at `address`."""
        with contextlib.suppress(psutil.Error, OSError):
            return any(
                socket.status == psutil.CONN_LISTEN
                and socket.laddr.port == self._port
                and _overlap(socket.laddr.ip, address)
                for socket in process.net_connections("tcp")
            )
        return False


def _overlap(listens_on: str, wanted: str | None) -> bool:
    if wanted is None:
        return True
    one, other = (_plain(address) for address in (listens_on, wanted))
    return one == other or ipaddress.ip_address(one).is_unspecified


def _plain(address: str) -> str:
    """Return an IP address without its scope, and IPv4 that is written as IPv6 as IPv4."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    return str(getattr(ip, "ipv4_mapped", None) or ip)
