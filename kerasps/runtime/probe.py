"""Asks, without TensorFlow, whether servers are at addresses, and whether they are awake."""

from __future__ import annotations

import contextlib
import enum
import errno
import os
import selectors
import socket
import struct
import time
from collections.abc import Hashable, Mapping
from typing import Any, TypeVar

from kerasps.runtime.addresses import split_address

_Task = TypeVar("_Task", bound=Hashable)

# What a client of HTTP/2 begins with: the preface and an empty SETTINGS frame (RFC 9113, 3.4). A
# server of gRPC begins with a SETTINGS frame of its own.
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"
_FRAME_HEADER = 9
_SETTINGS = 4


class Answer(enum.Enum):
    """The outcome of a question to an address."""

    SERVES = "a server of gRPC answers"
    REFUSES = "connection refused"
    IS_SILENT = "no answer"
    IS_OTHER = "something else than a TensorFlow server answers"


# How long a task has to answer. One that is there does so within a millisecond.
ANSWER_S = 1.0

# What holds of a host of several addresses, each with its answer. A refusal says that nobody is
# there, so all must refuse.
_BEST_FIRST = (Answer.SERVES, Answer.IS_OTHER, Answer.IS_SILENT, Answer.REFUSES)
# A machine without IPv6 cannot ask there, which says nothing of the other machine.
_NO_WAY = (errno.ENETUNREACH, errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


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


def ask_servers(addresses: Mapping[_Task, str], timeout_s: float) -> dict[_Task, Answer]:
    """Ask all addresses side by side whether a server of gRPC is there, and awake.

    The kernel accepts connections for a process that is stopped. So each is sent the first words of
    HTTP/2, which only a process that runs replies to. That costs a millisecond.

    Args:
        addresses: the `"host:port"` of each task.
        timeout_s: the time limit in seconds for all of them together.

    Returns:
        What came of each. A host that cannot be found, or reached, is silent.
    """
    # A name may have several addresses, and a server listens on one of them.
    answers: dict[_Task, list[Answer]] = {task: [] for task in addresses}
    places = {address: _resolved(address) for address in addresses.values()}
    deadline = time.monotonic() + timeout_s
    with selectors.DefaultSelector() as selector:
        for task, address in addresses.items():
            for place in places[address]:
                question = _Question(address, place)
                if question.socket is not None:
                    selector.register(question.socket, selectors.EVENT_WRITE, (task, question))
                elif question.answer is not None:
                    answers[task].append(question.answer)
        while selector.get_map():
            for key, _ in selector.select(max(0.0, deadline - time.monotonic())):
                task, question = key.data
                if question.socket is None:  # ended with the others of its task
                    continue
                question.go_on(selector)
                if question.answer is not None:
                    answers[task].append(question.answer)
                if question.answer is Answer.SERVES:
                    # Whatever the host's other addresses said.
                    _RESOLVED[addresses[task]] = places[addresses[task]]
                    _RESOLVE_AT.pop(addresses[task], None)
                    _end_all(selector, task)
            if time.monotonic() >= deadline:
                break
        for key in list(selector.get_map().values()):
            task, question = key.data
            question.end(selector)
            answers[task].append(Answer.IS_SILENT)
            # A machine that is gone refuses nothing, and its name may be another's by now.
            _RESOLVE_AT.setdefault(addresses[task], 0.0)
    return {
        task: min(heard, key=_BEST_FIRST.index, default=Answer.IS_SILENT)
        for task, heard in answers.items()
    }


def _end_all(selector: selectors.BaseSelector, task: Hashable) -> None:
    for key in list(selector.get_map().values()):
        other, question = key.data
        if other == task:
            question.end(selector)


class _Question:
    """One connection on its way: from connecting to the first bytes of the reply."""

    def __init__(self, address: str, place: tuple[Any, ...]) -> None:
        self.answer: Answer | None = None
        self.socket: socket.socket | None = None
        self._address = address
        self._is_asked = False
        self._reply = b""
        try:
            family, kind, protocol, _, name = place
            self.socket = socket.socket(family, kind, protocol)
            self.socket.setblocking(False)
            # A connection that is reset leaves nothing behind, and there is one a second per task.
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._connect(name)
        except OSError as exc:
            self._fail(exc)

    def _connect(self, name: Any) -> None:
        assert self.socket is not None
        code = self.socket.connect_ex(name)
        if code not in (0, errno.EINPROGRESS):
            raise OSError(code, os.strerror(code))

    def go_on(self, selector: selectors.BaseSelector) -> None:
        """Do what can be done without waiting."""
        assert self.socket is not None
        try:
            if not self._is_asked:
                self._ask(selector)
            else:
                self._read(selector)
        except BlockingIOError:
            return
        except OSError as exc:
            selector.unregister(self.socket)
            self._fail(exc)

    def end(self, selector: selectors.BaseSelector) -> None:
        """Close the connection."""
        assert self.socket is not None
        selector.unregister(self.socket)
        self._close(None)

    def _ask(self, selector: selectors.BaseSelector) -> None:
        assert self.socket is not None
        code = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code))
        if is_connected_to_itself(self.socket):
            raise ConnectionRefusedError
        self.socket.send(_PREFACE)
        self._is_asked = True
        selector.modify(self.socket, selectors.EVENT_READ, selector.get_key(self.socket).data)

    def _read(self, selector: selectors.BaseSelector) -> None:
        assert self.socket is not None
        chunk = self.socket.recv(_FRAME_HEADER)
        self._reply += chunk
        if len(self._reply) >= _FRAME_HEADER or not chunk:
            # A process that ends closes what it had accepted, without a word.
            is_server = self._reply[3:4] == bytes([_SETTINGS])
            nothing = Answer.IS_SILENT if not self._reply else Answer.IS_OTHER
            self.end(selector)
            self.answer = Answer.SERVES if is_server else nothing

    def _fail(self, error: OSError) -> None:
        _RESOLVED.pop(self._address, None)  # it may be elsewhere by now
        self._close(None if error.errno in _NO_WAY else _meaning(error))

    def _close(self, answer: Answer | None) -> None:
        self.answer = answer
        if self.socket is not None:
            self.socket.close()
            self.socket = None


# Where addresses are, as the resolver of names said last. To ask it anew each time would have all
# tasks wait where it is slow.
_RESOLVED: dict[str, list[tuple[Any, ...]]] = {}
# From when on the name of a silent address is resolved again.
_RESOLVE_AT: dict[str, float] = {}
# Seconds between two such questions. A resolver that is out of reach takes about as long to fail.
_RESOLVE_EVERY_S = 5.0


def _resolved(address: str) -> list[tuple[Any, ...]]:
    """Return the socket addresses of a host, none where it cannot be found."""
    silent = address in _RESOLVE_AT
    if address in _RESOLVED and not (silent and time.monotonic() >= _RESOLVE_AT[address]):
        return _RESOLVED[address]
    if silent:
        _RESOLVE_AT[address] = time.monotonic() + _RESOLVE_EVERY_S
    host, port = split_address(address)
    try:
        _RESOLVED[address] = list(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
    except OSError:  # who was found once may be there again
        return _RESOLVED.get(address, [])
    return _RESOLVED[address]


def _meaning(error: OSError) -> Answer:
    return (
        Answer.REFUSES
        if error.errno == errno.ECONNREFUSED or isinstance(error, ConnectionRefusedError)
        else Answer.IS_SILENT
    )


def break_connections(address: str) -> int:
    """Shut this process's connections to an address down; return how many there were.

    Calls that wait for a task which hangs end with that, in an error; nothing else ends them.
    Linux alone lists a process's sockets; elsewhere none is found.
    """
    try:
        names = os.listdir("/proc/self/fd")
    except OSError:
        return 0
    places = [name for _, _, _, _, name in _resolved(address)]
    broken = 0
    for number in names:
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(number))) as connection:
                peer = connection.getpeername()
                if any(_is_same(peer, place) for place in places):
                    connection.shutdown(socket.SHUT_RDWR)
                    broken += 1
    return broken


def _is_same(peer: Any, name: Any) -> bool:
    """Return whether two socket addresses are one; IPv4 may be written as IPv6."""
    if not isinstance(peer, tuple) or peer[1] != name[1]:
        return False
    return bool(str(peer[0]).removeprefix("::ffff:") == str(name[0]).removeprefix("::ffff:"))
