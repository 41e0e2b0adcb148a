"""Probes addresses, without TensorFlow, for servers that run and answer."""

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
from kerasps.runtime.open_sockets import open_sockets

_Task = TypeVar("_Task", bound=Hashable)

# The first bytes of an HTTP/2 client: the preface and an empty SETTINGS frame (RFC 9113, 3.4). A
# gRPC server begins with a SETTINGS frame too.
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"
_FRAME_HEADER = 9
_SETTINGS, _PING, _GOAWAY = 4, 6, 7
# gRPC's limit is three pings while a server sends nothing; so the last of these is too many.
_NUM_PINGS = 5
_PINGS = b"".join(
    b"\x00\x00\x08\x06\x00\x00\x00\x00\x00" + struct.pack(">Q", number)
    for number in range(_NUM_PINGS)
)


class Answer(enum.Enum):
    """The result of a probe of an address."""

    SERVES = "a server of gRPC answers"
    REFUSES = "connection refused"
    IS_SILENT = "no answer"
    IS_OTHER = "something else than a TensorFlow server answers"


# The time limit for an answer. A running task answers within a millisecond.
ANSWER_S = 1.0

# The first of these that any address of a host gave is the answer of the host. A refusal means that
# nobody listens, so it counts only if all addresses refuse.
_BEST_FIRST = (Answer.SERVES, Answer.IS_OTHER, Answer.IS_SILENT, Answer.REFUSES)
# Errors of a machine without IPv6, for example: they say nothing about the other machine.
_NO_WAY = (errno.ENETUNREACH, errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


def connection_error(address: str, timeout_s: float) -> OSError | None:
    """Return the error of an attempt to connect to an address, None if a server accepts.

    A `ConnectionRefusedError` means that the machine runs and nobody listens. Any other error does
    not tell: the machine or the network may be silent for a while.
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
    """Return whether a socket is connected to itself.

    Linux picks the local port of a connection. If it happens to pick the port that the socket
    connects to, the socket is connected to itself, without a server.
    """
    return bool(connection.getsockname() == connection.getpeername())


def ask_servers(addresses: Mapping[_Task, str], timeout_s: float) -> dict[_Task, Answer]:
    """Probe all addresses concurrently for a gRPC server that runs.

    The kernel accepts connections for a stopped process. So this sends the first bytes of HTTP/2 to
    each, to which only a running process replies. That costs a millisecond.

    Returns:
        The answer of each. A host whose name is unknown, or that is unreachable, counts as silent.
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
                    # This decides, whatever the host's other addresses answer.
                    _RESOLVED[addresses[task]] = places[addresses[task]]
                    _RESOLVE_AT.pop(addresses[task], None)
                    _end_all(selector, task)
            if time.monotonic() >= deadline:
                break
        for key in list(selector.get_map().values()):
            task, question = key.data
            question.end(selector)
            answers[task].append(Answer.IS_SILENT)
            # A machine that was removed refuses nothing, and its name may belong to another now.
            _RESOLVE_AT.setdefault(addresses[task], 0.0)
    return {
        task: min(heard, key=_BEST_FIRST.index, default=Answer.IS_SILENT)
        for task, heard in answers.items()
    }


def limits_pings(address: str, timeout_s: float) -> bool:
    """Return whether the gRPC server at an address closes a connection after some pings.

    Servers of kerasps do not (`cluster.serving.ping_limit`), all others do. A server that does not
    answer in time counts as one of kerasps.
    """
    num_answered, reply = 0, b""
    try:
        with socket.create_connection(split_address(address), timeout=timeout_s) as connection:
            connection.sendall(_PREFACE + _PINGS)
            while num_answered < _NUM_PINGS:
                chunk = connection.recv(4096)
                reply += chunk
                if not chunk:
                    return bool(reply)
                while len(reply) >= _FRAME_HEADER:
                    end = _FRAME_HEADER + int.from_bytes(reply[:3], "big")
                    if len(reply) < end:
                        break
                    if reply[3] == _GOAWAY:
                        return True
                    num_answered += reply[3] == _PING
                    reply = reply[end:]
    except ConnectionError:
        return bool(num_answered)
    except OSError:
        return False
    return False


def _end_all(selector: selectors.BaseSelector, task: Hashable) -> None:
    for key in list(selector.get_map().values()):
        other, question = key.data
        if other == task:
            question.end(selector)


class _Question:
    """One probe in progress: from connecting to the first bytes of the reply."""

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
            # Reset the connection on close, which leaves no state: there is one a second per task.
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
        """Advance the probe as far as possible without waiting."""
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
            # A process that ends closes accepted connections without a reply.
            is_server = self._reply[3:4] == bytes([_SETTINGS])
            nothing = Answer.IS_SILENT if not self._reply else Answer.IS_OTHER
            self.end(selector)
            self.answer = Answer.SERVES if is_server else nothing

    def _fail(self, error: OSError) -> None:
        _RESOLVED.pop(self._address, None)  # the name may have another address by now
        self._close(None if error.errno in _NO_WAY else _meaning(error))

    def _close(self, answer: Answer | None) -> None:
        self.answer = answer
        if self.socket is not None:
            self.socket.close()
            self.socket = None


# The last resolved socket addresses of each `"host:port"`. Resolving again each time would delay
# the probes of all tasks if the resolver is slow.
_RESOLVED: dict[str, list[tuple[Any, ...]]] = {}
# The time from which on the name of a silent address is resolved again.
_RESOLVE_AT: dict[str, float] = {}
# The pause between two such queries. An unreachable resolver takes about as long to fail.
_RESOLVE_EVERY_S = 5.0


def _resolved(address: str) -> list[tuple[Any, ...]]:
    """Return the socket addresses of a host, none if its name cannot be resolved."""
    silent = address in _RESOLVE_AT
    if address in _RESOLVED and not (silent and time.monotonic() >= _RESOLVE_AT[address]):
        return _RESOLVED[address]
    if silent:
        _RESOLVE_AT[address] = time.monotonic() + _RESOLVE_EVERY_S
    host, port = split_address(address)
    try:
        _RESOLVED[address] = list(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
    except OSError:  # keep the last known addresses
        return _RESOLVED.get(address, [])
    return _RESOLVED[address]


def _meaning(error: OSError) -> Answer:
    return (
        Answer.REFUSES
        if error.errno == errno.ECONNREFUSED or isinstance(error, ConnectionRefusedError)
        else Answer.IS_SILENT
    )


def break_connections(address: str) -> int:
    """Shut down this process's connections to an address; return their number.

    Calls that wait for a task which hangs then end with an error; nothing else ends them. Only
    Linux lists a process's sockets; other systems have none to shut down.
    """
    places = [name for _, _, _, _, name in _resolved(address)]
    broken = 0
    for connection in open_sockets():
        with contextlib.suppress(OSError):
            peer = connection.getpeername()
            if any(_is_same(peer, place) for place in places):
                connection.shutdown(socket.SHUT_RDWR)
                broken += 1
    return broken


def _is_same(peer: Any, name: Any) -> bool:
    """Return whether two socket addresses are equal; IPv4 may be written as IPv6."""
    if not isinstance(peer, tuple) or peer[1] != name[1]:
        return False
    return bool(str(peer[0]).removeprefix("::ffff:") == str(name[0]).removeprefix("::ffff:"))
