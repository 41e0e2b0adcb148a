"""Tells the tasks of `kerasps run` that the run has ended, and with which exit code.

While the script runs, its coordinator listens on the chief's port. When it has ended, the process
that started it listens there and answers each task. A task asks when it has no connection of a
coordinator. No further port is needed, and a task that asks too early meets a server of gRPC, a
refusal, or nobody.
"""

from __future__ import annotations

import contextlib
import re
import socket
import time
from collections.abc import Iterable

from kerasps.cluster.serving.renewal import connections_to
from kerasps.runtime.addresses import split_address

# Ends with the end of the line, so that half of an answer is none.
_ANSWER = re.compile(rb"kerasps run ended ([0-9]{1,3})\n")
_MOST_BYTES = 64
_ASK_TIMEOUT_S = 1.0
# How often a task without a connection asks.
_BETWEEN_QUESTIONS_S = 1.0


def ask_run_end(chief: str, timeout_s: float = _ASK_TIMEOUT_S) -> int | None:
    """Return the exit code of a run that has ended; None where that is not known.

    Args:
        chief: the `"host:port"` of the chief.
        timeout_s: the time limit in seconds for the connection, and for each part of the answer.
    """
    received = b""
    try:
        with socket.create_connection(split_address(chief), timeout=timeout_s) as connection:
            while len(received) < _MOST_BYTES and b"\n" not in received:
                part = connection.recv(_MOST_BYTES)
                if not part:
                    break
                received += part
    except OSError:
        return None
    answer = _ANSWER.fullmatch(received)
    return None if answer is None else int(answer[1])


def announce_run_end(
    address: str | None, port: int, code: int, tasks: Iterable[str], *, timeout_s: float
) -> set[str]:
    """Answer the tasks that ask for the exit code, until each host has asked or the time is over.

    Args:
        address: the IP address of this machine to listen on; None for all.
        port: the chief's port, on which nobody listens any more.
        code: the exit code, from 0 to 255.
        tasks: the IP addresses from which questions are expected, once for each task.
        timeout_s: the time limit in seconds.

    Returns:
        The addresses that have not asked as often as they hold tasks.
    """
    missing = list(tasks)
    family = socket.AF_INET6 if address is None or ":" in address else socket.AF_INET
    deadline = time.monotonic() + timeout_s
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6 and address is None:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind((address or "::", port))
        listener.listen()
        while missing and time.monotonic() < deadline:
            listener.settimeout(max(0.01, deadline - time.monotonic()))
            with contextlib.suppress(OSError):
                connection, peer = listener.accept()
                with connection:
                    connection.sendall(b"kerasps run ended %d\n" % code)
                    host = str(peer[0]).removeprefix("::ffff:")
                    with contextlib.suppress(ValueError):
                        missing.remove(host)
    return set(missing)


class RunEndWatch:
    """Asks the chief, time and again, whether the run has ended.

    Args:
        port: the port of this task; while a coordinator is connected to it, nobody is asked.
        chief: the `"host:port"` of the chief.
        timeout_s: the seconds without a coordinator after which the task gives up.
    """

    # Of a run whose chief is gone for good: an error that is worth another try.
    GIVEN_UP = 138

    def __init__(self, port: int, chief: str, *, timeout_s: float) -> None:
        self._port = port
        self._chief = chief
        self._timeout_s = timeout_s
        self._alone_since = time.monotonic()
        self._asked_at = 0.0
        self.exit_code: int | None = None

    def is_over(self) -> bool:
        """Return whether the task may end, with `exit_code`. Call every half second."""
        now = time.monotonic()
        if connections_to(self._port):
            self._alone_since = now
            return False
        if now - self._asked_at < _BETWEEN_QUESTIONS_S:
            return False
        self._asked_at = now
        self.exit_code = ask_run_end(self._chief)
        if self.exit_code is None and now - self._alone_since > self._timeout_s:
            self.exit_code = self.GIVEN_UP
        return self.exit_code is not None
