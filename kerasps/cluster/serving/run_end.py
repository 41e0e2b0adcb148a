"""Tells the nodes of `kerasps run` that the run has ended, and with which exit code.

While the script runs, its coordinator listens on the chief's port. When it has ended, the process
that started it listens there and answers each task that asks. So no further port is needed. A task
says who it is before it gets an answer: gRPC's own connections, and the probes of a scheduler, come
to that port too.
"""

from __future__ import annotations

import re
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Collection

from kerasps.cluster.serving.renewal import can_watch, connections_to
from kerasps.runtime.addresses import split_address

Task = tuple[str, int]

# Both end with the end of the line, so that half of one is none.
_QUESTION = re.compile(rb"kerasps run: (chief|worker|ps|evaluator) ([0-9]{1,9}) asks\n")
_ANSWER = re.compile(rb"kerasps run: ended with ([0-9]{1,3})\n")
_MOST_BYTES = 64
_ASK_TIMEOUT_S = 1.0
_BETWEEN_QUESTIONS_S = 1.0
# How long a task goes on asking after a connection to it was closed: it takes a script a while to
# end, whose threads have ended.
_ASK_FOR_S = 60.0
# Nobody but the tasks is waited for. Who else asks, as an evaluator does, asks this often.
_LEAST_S = 2.0
_POLL_S = 0.05
# The exit code of a run that a lost task has ended. Schedulers that read exit codes try it again,
# as they do after a signal.
CODE_OF_LOST = 138


def ask_run_end(chief: str, task: Task, timeout_s: float = _ASK_TIMEOUT_S) -> int | None:
    """Return the exit code of a run that has ended; None where somebody else listens there.

    Args:
        chief: the `"host:port"` of the chief.
        task: the type and index of the task that asks.
        timeout_s: the time limit in seconds for the connection, and for each part of the answer.

    Raises:
        OSError: nobody accepts a connection there.
    """
    received = b""
    with socket.create_connection(split_address(chief), timeout=timeout_s) as connection:
        try:
            connection.sendall(b"kerasps run: %s %d asks\n" % (task[0].encode(), task[1]))
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
    address: str | None,
    port: int,
    code: int,
    tasks: Collection[Task],
    *,
    timeout_s: float,
    is_hurried: Callable[[], bool] = lambda: False,
) -> set[Task]:
    """Answer those that ask for the exit code, until each task has asked or the time is over.

    Args:
        address: the IP address of this machine to listen on; None for all.
        port: the chief's port, on which nobody listens any more.
        code: the exit code, from 0 to 255.
        tasks: the tasks to wait for.
        timeout_s: the time limit in seconds.
        is_hurried: asked again and again; returns True where there is no time left.

    Returns:
        The tasks that have not asked.

    Raises:
        OSError: the port is taken.
    """
    began = time.monotonic()
    with _Announcer(address, port, code) as announcer:
        thread = threading.Thread(target=announcer.serve_forever, args=(_POLL_S,), daemon=True)
        thread.start()
        try:
            while not is_hurried():
                waited = time.monotonic() - began
                missing = set(tasks) - announcer.answered
                if waited > timeout_s or (not missing and waited > _LEAST_S):
                    break
                time.sleep(_POLL_S)
        finally:
            announcer.shutdown()
    return set(tasks) - announcer.answered


class _Announcer(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    # A task that has asked has its answer within a round trip.
    block_on_close = False

    def __init__(self, address: str | None, port: int, code: int) -> None:
        self.answered: set[Task] = set()
        self.code = code
        if address is None and socket.has_dualstack_ipv6():
            address = "::"
        self._is_on_all = address == "::"
        self.address_family = socket.AF_INET6 if ":" in (address or "") else socket.AF_INET
        super().__init__((address or "0.0.0.0", port), _Answerer)

    def server_bind(self) -> None:
        if self._is_on_all:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing of a connection that was broken off."""


class _Answerer(socketserver.StreamRequestHandler):
    timeout = 2 * _ASK_TIMEOUT_S
    server: _Announcer

    def handle(self) -> None:
        question = _QUESTION.fullmatch(self.rfile.readline(_MOST_BYTES))
        if question is not None:
            self.wfile.write(b"kerasps run: ended with %d\n" % self.server.code)
            self.server.answered.add((question[1].decode(), int(question[2])))


class RunEndWatch:
    """Finds out from the chief whether the run has ended.

    The chief is asked where there is a reason to: while nobody is connected to this task, and for a
    minute after a connection was closed.

    Args:
        chief: the `"host:port"` of the chief.
        task: the type and index of this task.
        timeout_s: the seconds for which nobody listens at that address, after which the task gives
            up with `CODE_OF_LOST`.
        port: the port of this task. None (default) for one without a server, which asks always.
        say: prints a text about the end. Default: nothing is printed.
    """

    def __init__(
        self,
        chief: str,
        task: Task,
        *,
        timeout_s: float,
        port: int | None = None,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._chief = chief
        self._task = task
        self._timeout_s = timeout_s
        self._port = port
        self._say = say
        self._seen: set[str] = set()
        self._ask_until = self._asked_at = 0.0
        self._heard_at = time.monotonic()
        self.exit_code: int | None = None

    def is_over(self) -> bool:
        """Return whether this task is to end, with `exit_code`. Call about every half second."""
        if self.exit_code is not None:
            return True
        now = time.monotonic()
        if not self._has_reason(now):
            self._heard_at = now
            return False
        if now - self._asked_at < _BETWEEN_QUESTIONS_S:
            return False
        self._asked_at = now
        try:
            self.exit_code = ask_run_end(self._chief, self._task)
        except OSError:
            # Nobody is there, so whoever comes is asked too.
            self._ask_until = now + _ASK_FOR_S
        else:
            self._heard_at = now
        if self.exit_code is not None:
            self._say(f"the run has ended with exit code {self.exit_code}")
        elif now - self._heard_at > self._timeout_s:
            self.exit_code = CODE_OF_LOST
            self._say(
                f"the chief at {self._chief} has not been there for {self._timeout_s:g} s, and "
                "the task gives up"
            )
        return self.exit_code is not None

    def _has_reason(self, now: float) -> bool:
        if self._port is None or not can_watch():
            return True
        connected = connections_to(self._port)
        if self._seen - connected:
            self._ask_until = now + _ASK_FOR_S
        self._seen = connected
        return not connected or now < self._ask_until
