"""Makes TensorFlow's server listen on one address of this machine, instead of on all.

TensorFlow binds to `0.0.0.0:port`, whatever the cluster's description says, and has no option for
it. Anyone who reaches the port can read and write files as the user who runs the server. So while a
server starts, the calls of `bind` in TensorFlow's library come here (`linkage` finds where the
library stores the function's address). A bind of the server's port to all addresses becomes a bind
to the given address. Any other bind is passed to the system unchanged. When the server has started,
the library is restored. This module runs Python, and TensorFlow's later work must not wait for
Python's lock. (A coordinator's start holds that lock. It binds in the thread that has the lock, and
waits for no other thread.)

If a socket keeps the port for the server (`held_port`), the same replacement lets the server share
it.
"""

from __future__ import annotations

import ctypes
import errno
import ipaddress
import re
import socket
import struct
import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from kerasps.cluster.serving.held_port import HeldPort, share
from kerasps.cluster.serving.listen_address import BIND_VARIABLE, may_listen_on_all
from kerasps.errors import TaskStartError
from kerasps.runtime.linkage import UnknownLayoutError, find_slots

# gRPC is in one of TensorFlow's libraries, which one depends on the build; some distributions have
# a separate library for it.
LIBRARIES = re.compile(r"tensorflow.*\.so\b|^libgrpc\.so\b")
_ANY_IPV4 = bytes(4)
_MAPPED = bytes(10) + b"\xff\xff"
# The two forms of "all addresses" of an IPv6 socket that accepts IPv4 too.
_ANY_IPV6 = (bytes(16), _MAPPED + _ANY_IPV4)
# From <netinet/in.h>: family, port and address, for IPv6 with a flow and a scope. The family is in
# the byte order of the machine, which is little-endian where `linkage` finds a slot.
_IPV4_BYTES, _IPV6_BYTES = 16, 28

_FUNCTION = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_uint32, use_errno=True
)


@contextmanager
def listening_on(
    address: str | None,
    port: int,
    libraries: re.Pattern[str] = LIBRARIES,
    *,
    held: HeldPort | None = None,
) -> Iterator[None]:
    """Make the server that starts within this context listen on `address` alone.

    Call after the library that starts the server is loaded.

    Args:
        address: an IP address of this machine. None does not change the server's address.
        libraries: the pattern of the names of the libraries that start a server. Default: those of
            TensorFlow.
        held: the sockets that keep the port for the server. None (default) if there are none. If
            the library cannot let the server share the port, they are closed before it binds.

    Raises:
        TaskStartError: the library is not laid out as expected, so the server would listen on all
            addresses, or does.

    Warns:
        RuntimeWarning: the same, if KERASPS_BIND allows all addresses.
    """
    if address is None and not held:
        yield
        return
    redirection = _Redirection(address, port, is_held=bool(held))
    with _lock, ExitStack() as stack:
        stack.enter_context(redirection)
        num_slots, reasons = _redirect(libraries, stack)
        if not num_slots and address is not None and not may_listen_on_all():
            raise _cannot_be_held(address, port, "; ".join(reasons))
        if not num_slots and held:
            held.close()
        yield
    if address is not None and not redirection.num_binds:
        error = _cannot_be_held(
            address, port, "; ".join(reasons) or "the server did not call it, and listens now"
        )
        if not may_listen_on_all():
            raise error
        warnings.warn(str(error), RuntimeWarning, stacklevel=3)


class _Redirection:
    """Turns binds to all addresses into binds to a single address, if one is given."""

    def __init__(self, address: str | None, port: int, *, is_held: bool) -> None:
        self._port = struct.pack("!H", port)
        self._is_held = is_held
        self._is_for_all = address is None
        self.num_binds = 0
        if address is None:
            return
        # The address is numeric, so this makes no query.
        family, _, _, _, place = socket.getaddrinfo(
            address, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
        )[0]
        self._ip = ipaddress.ip_address(str(place[0]).partition("%")[0]).packed
        self._scope = struct.pack("=I", place[3]) if len(place) == 4 else None
        self._is_ipv4 = family == socket.AF_INET

    def __enter__(self) -> None:
        global _current
        _current = self

    def __exit__(self, *exc_info: object) -> None:
        global _current
        _current = None

    def shares(self, given: bytes) -> bool:
        """Return whether a socket that binds to an address shares it with the held sockets."""
        return self._is_held and given[2:4] == self._port

    def applied(self, given: bytes) -> bytes | None:
        """Return the address to bind to in place of a given one; None if the bind must fail."""
        if given[2:4] != self._port or self._is_for_all:
            return given
        family = int.from_bytes(given[:2], "little")
        if family == socket.AF_INET and len(given) >= _IPV4_BYTES and given[4:8] == _ANY_IPV4:
            self.num_binds += 1
            return given[:4] + self._ip + given[8:] if self._is_ipv4 else None
        if family == socket.AF_INET6 and len(given) >= _IPV6_BYTES and given[8:24] in _ANY_IPV6:
            self.num_binds += 1
            ip = _MAPPED + self._ip if self._is_ipv4 else self._ip
            return given[:8] + ip + (self._scope or given[24:28]) + given[28:]
        return given


# One server starts at a time. Any thread that binds a socket reads `_current`.
_lock = threading.Lock()
_current: _Redirection | None = None
_real_bind = _FUNCTION(("bind", ctypes.CDLL(None)))


@_FUNCTION
def _bind(descriptor: int, pointer: int | None, length: int) -> int:
    # An exception would be lost here, and the socket would count as bound: it would listen on a
    # port that the system chooses, on all addresses.
    try:
        redirection = _current
        if redirection is None or pointer is None or length < _IPV4_BYTES:
            return int(_real_bind(descriptor, pointer, length))
        given = ctypes.string_at(pointer, length)
        applied = redirection.applied(given)
        if applied is None:
            # Never bind to all addresses instead. gRPC then tries a socket of the other family.
            ctypes.set_errno(errno.EADDRNOTAVAIL)
            return -1
        if redirection.shares(given):
            share(descriptor)
        if applied is given:
            return int(_real_bind(descriptor, pointer, length))
        buffer = ctypes.create_string_buffer(applied, len(applied))
        return int(_real_bind(descriptor, ctypes.addressof(buffer), length))
    except BaseException:
        ctypes.set_errno(errno.EINTR)
        return -1


def _address_of(function: object) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0  # type: ignore[arg-type]


def _redirect(libraries: re.Pattern[str], stack: ExitStack) -> tuple[int, list[str]]:
    """Redirect the libraries' calls of `bind` to `_bind` until `stack` ends.

    Returns:
        The number of redirected libraries, and the reasons why others were not redirected.
    """
    try:
        slots = find_slots("bind", libraries)
    except UnknownLayoutError as exc:
        return 0, [str(exc)]
    reasons = [] if slots else ["no library of TensorFlow in this process calls `bind`"]
    for slot in slots:
        before = slot.read()
        if before != _address_of(_real_bind) and not slot.is_unresolved():
            reasons.append(f"{slot.library}: its `bind` is not that of the system")
            continue
        try:
            slot.write(_address_of(_bind))
        except OSError as exc:
            reasons.append(f"{slot.library}: {exc.strerror}")
            continue
        stack.callback(slot.write, before)
    return len(slots) - len(reasons) if slots else 0, reasons


def _cannot_be_held(address: str, port: int, reason: str) -> TaskStartError:
    return TaskStartError(
        f"The server cannot be held to {address}, and port {port} would be open on every network "
        "interface: anyone who reaches it can read and write files as this user. Expected: a "
        f"library of TensorFlow whose call of `bind` can be changed. Received: {reason}. If all "
        "may reach the port, or a firewall protects it, set the environment variable "
        f"{BIND_VARIABLE} to 0.0.0.0. If the server listens already, end this process."
    )
