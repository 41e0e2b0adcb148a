"""Tells the nodes of `kerasps run` that the run has ended, and with which exit code.

While the script runs, its coordinator listens on the chief's port. After the script has ended, its
parent process listens there and answers each task that asks. So no further port is needed. A task
sends its name before it gets an answer: gRPC connections, and the probes of a scheduler, come to
that port too.
"""

from __future__ import annotations

import contextlib
import re
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Collection

from kerasps.cluster.serving.renewal import can_watch, last_connections_to
from kerasps.runtime.addresses import split_address

Task = tuple[str, int]

# Both include the end of the line, so that half a message does not match.
_QUESTION = re.compile(
    rb"kerasps run: (chief|worker|ps|evaluator) ([0-9]{1,9})(?: asks| ended with ([0-9]{1,3}))\n"
)
_ANSWER = re.compile(rb"kerasps run: ended with ([0-9]{1,3})\n")
_MOST_BYTES = 64
_ASK_TIMEOUT_S = 1.0
_BETWEEN_QUESTIONS_S = 1.0
# How long a task keeps asking after a connection to it was closed: a script may take a while to end
# after its connections are closed.
_ASK_FOR_S = 60.0
# Answer at least this long: others than the tasks, such as an evaluator, ask more often than this.
_LEAST_S = 2.0
# A running task asks once a second; one that was silent for so long is not waited for.
_SILENT_S = 45.0
_POLL_S = 0.05
# The exit code of a run that ended because a task was lost. Schedulers that read exit codes retry
# it, as they do after a signal.
CODE_OF_LOST = 138


def ask_run_end(
    chief: str, task: Task, *, ended_with: int | None = None, timeout_s: float = _ASK_TIMEOUT_S
) -> int | None:
    """Return the exit code of a run that has ended; None if it has not.

    Another process may listen there: the coordinator, while the script runs.

    Raises:
        OSError: no process accepts a connection there.
    """
    what = b"asks" if ended_with is None else b"ended with %d" % ended_with
    received = b""
    with socket.create_connection(split_address(chief), timeout=timeout_s) as connection:
        try:
            connection.sendall(b"kerasps run: %s %d %s\n" % (task[0].encode(), task[1], what))
            while len(received) < _MOST_BYTES and b"\n" not in received:
                part = connection.recv(_MOST_BYTES)
                if not part:
                    break
                received += part
        except OSError:
            return None
    answer = _ANSWER.fullmatch(received)
    return None if answer is None else int(answer[1])


def wait_for_run_end(chief: str, task: Task, *, timeout_s: float) -> int | None:
    """Return the exit code of a run whose chief has ended; None if there is none in time."""
    deadline = time.monotonic() + timeout_s
    code = None
    while code is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            code = ask_run_end(chief, task)
        if code is None:
            time.sleep(_POLL_S)
    return code


class RunEndAnnouncer:
    """Answers tasks that ask for the exit code of a run, from its construction on.

    If workers drive their own steps, the chief's script may end before theirs. Then only workers
    whose scripts have ended get an answer, until all have ended; the exit code is the first one
    that is not 0.

    Args:
        port: the chief's port, on which nobody listens any more.
        code: the exit code, from 0 to 255.
        tasks: the tasks that need an answer.
        waits_for: those of them that have to end first, if the code is 0. Default: none.

    Raises:
        OSError: the port is taken.
    """

    def __init__(
        self,
        address: str | None,
        port: int,
        code: int,
        tasks: Collection[Task],
        *,
        waits_for: Collection[Task] = (),
    ) -> None:
        self._state = _RunEnd(code, set() if code else set(waits_for))
        self._tasks = set(tasks)
        self._server = _Server(address, port, self._state)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_POLL_S,), daemon=True
        )
        self._thread.start()

    @property
    def code(self) -> int:
        """The exit code of the run."""
        return self._state.code

    def finish(self, timeout_s: float, is_hurried: Callable[[], bool] = lambda: False) -> set[Task]:
        """Answer until each task has its answer, or the time is over; return those without one.

        Args:
            timeout_s: the time limit in seconds, counted from the end of all of `waits_for`.
            is_hurried: called repeatedly; returns True if there is no time left.
        """
        while self._state.running(time.monotonic() - _SILENT_S) and not is_hurried():
            time.sleep(_POLL_S)
        began = time.monotonic()
        while not is_hurried():
            waited = time.monotonic() - began
            if waited > timeout_s or (not self._missing() and waited > _LEAST_S):
                break
            time.sleep(_POLL_S)
        return self._missing()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _missing(self) -> set[Task]:
        return self._tasks - self._state.answered


class _RunEnd:
    """The end of a run: its exit code, and the tasks that still run. Thread: any."""

    def __init__(self, code: int, waits_for: set[Task]) -> None:
        self.code = code
        self.answered: set[Task] = set()
        self._lock = threading.Lock()
        now = time.monotonic()
        # The time of the last question of each task that still runs.
        self._running = dict.fromkeys(waits_for, now)

    def running(self, since: float) -> bool:
        """Return whether tasks of `waits_for` still run; forget those silent since a time."""
        with self._lock:
            self._running = {task: at for task, at in self._running.items() if at >= since}
            return bool(self._running)

    def answer(self, task: Task, ended_with: int | None) -> int | None:
        """Return the exit code for a task that asks; None where it gets no answer yet."""
        with self._lock:
            if ended_with is not None:
                self._running.pop(task, None)
                self.code = self.code or ended_with
            elif task in self._running:
                self._running[task] = time.monotonic()
            if self._running and ended_with is None:
                return None
            self.answered.add(task)
            return self.code


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    # A task that asks gets its answer within a round trip.
    block_on_close = False

    def __init__(self, address: str | None, port: int, state: _RunEnd) -> None:
        self.state = state
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
        """Print nothing about a connection that broke."""


class _Answerer(socketserver.StreamRequestHandler):
    timeout = 2 * _ASK_TIMEOUT_S
    server: _Server

    def handle(self) -> None:
        question = _QUESTION.fullmatch(self.rfile.readline(_MOST_BYTES))
        if question is None:
            return
        ended_with = None if question[3] is None else int(question[3])
        code = self.server.state.answer((question[1].decode(), int(question[2])), ended_with)
        if code is not None:
            self.wfile.write(b"kerasps run: ended with %d\n" % code)


class RunEndWatch:
    """Asks the chief whether the run has ended.

    It asks only while nobody is connected to this task, and for a minute after a connection was
    closed.

    Args:
        timeout_s: the seconds after which the task gives up with `CODE_OF_LOST`, if nobody listens
            at that address.
        port: the port of this task. None (default) for a task without a server, which always asks.
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
        # The exit code of this task's script, if it has one and that has ended.
        self.ended_with: int | None = None

    def is_over(self) -> bool:
        """Return whether this task must end, with `exit_code`. Call about every half second."""
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
            self.exit_code = ask_run_end(self._chief, self._task, ended_with=self.ended_with)
        except OSError:
            # Nobody listens now, so keep asking when somebody does.
            self._ask_until = now + _ASK_FOR_S
        else:
            self._heard_at = now
        if self.exit_code is not None:
            self._say(f"the run has ended with exit code {self.exit_code}")
        elif now - self._heard_at > self._timeout_s:
            self.exit_code = CODE_OF_LOST
            self._say(
                f"the chief at {self._chief} has not answered for {self._timeout_s:g} s, and the "
                "task gives up"
            )
        return self.exit_code is not None

    def _has_reason(self, now: float) -> bool:
        if self._port is None or not can_watch():
            return True
        connected = last_connections_to(self._port)
        if self._seen - connected:
            self._ask_until = now + _ASK_FOR_S
        self._seen = connected
        return not connected or now < self._ask_until
