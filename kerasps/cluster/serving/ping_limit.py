"""Makes TensorFlow's server accept any number of pings.

A task pings the tasks that it waits for, so that a call to one that hangs ends
(`runtime.grpc_options`). A server of gRPC allows three pings while it sends nothing, if they come
within five minutes each; then it closes the connection (`Too many pings`). So a step that is longer
than two minutes would never end. The limit is an option of the server, and TensorFlow has no way to
set it. So while a server starts, the call of the constructor of gRPC's server in TensorFlow's
library comes here (`linkage`), and the server gets one option more.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from kerasps.cluster.serving.bind import LIBRARIES
from kerasps.runtime.linkage import Slot, UnknownLayoutError, find_slots

# grpc::Server::Server(grpc::ChannelArguments*, ...), as the compiler names it.
_CONSTRUCTOR = (
    "_ZN4grpc6ServerC1EPNS_16ChannelArgumentsESt10shared_ptrISt6vectorISt10unique_ptrINS_"
    "21ServerCompletionQueueESt14default_deleteIS6_EESaIS9_EEEiiiS4_IS3_INS_8internal30External"
    "ConnectionAcceptorImplEESaISF_EEP26grpc_server_config_fetcherP19grpc_resource_quotaS4_IS5_"
    "INS_12experimental33ServerInterceptorFactoryInterfaceES7_ISN_EESaISP_EEPNSM_20ServerMetric"
    "RecorderE"
)
# Its arguments and the object itself: pointers and integers, each one word.
_FUNCTION = ctypes.CFUNCTYPE(None, *[ctypes.c_uint64] * 11)
# The option, and the value that stands for no limit.
_OPTION, _NO_LIMIT = b"grpc.http2.max_ping_strikes", 0


class _Option(ctypes.Structure):
    """An option of gRPC: `grpc_arg` in <grpc/impl/grpc_types.h>."""

    _fields_ = (
        ("kind", ctypes.c_int),
        ("name", ctypes.c_char_p),
        ("value", ctypes.c_int64),
        ("other_value", ctypes.c_int64),
    )


_KINDS = (0, 1, 2)
_INTEGER = 1
_MOST_OPTIONS = 100
# The option that each of TensorFlow's servers has.
_KNOWN_OPTION = b"grpc.max_receive_message_length"


class PingLimit:
    """The limit of the server that starts within `without_ping_limit`."""

    # True once a server without the limit has started.
    is_lifted = False


@contextmanager
def without_ping_limit() -> Iterator[PingLimit]:
    """Make the server that starts within this context accept any number of pings.

    If the library is not laid out as expected, the server keeps its limit. Call after the library
    that starts the server is loaded; one thread at a time.
    """
    limit = PingLimit()
    with ExitStack() as stack:
        for slot in _slots():
            before = slot.read()
            assert slot.defined_at is not None
            real = _FUNCTION(slot.defined_at if slot.is_unresolved() else before)
            replacement = _replacement(real, limit)
            try:
                slot.write(ctypes.cast(replacement, ctypes.c_void_p).value or before)
            except OSError:
                continue
            stack.callback(slot.write, before)
            # The replacement must live as long as the slot refers to it.
            stack.callback(id, replacement)
        yield limit


def _slots() -> list[Slot]:
    try:
        return find_slots(_CONSTRUCTOR, LIBRARIES, is_imported=False)
    except UnknownLayoutError:
        return []


def _replacement(real: Callable[..., None], limit: PingLimit) -> Any:
    def construct(*words: int) -> None:
        # The options are a std::vector: its begin, its end, and the end of its memory.
        vector = (ctypes.c_uint64 * 3).from_address(words[1])
        begin, end, capacity = vector
        options = _with_option(begin, end)
        if options is not None:
            vector[0] = ctypes.addressof(options)
            vector[1] = vector[2] = ctypes.addressof(options) + ctypes.sizeof(options)
            limit.is_lifted = True
        try:
            real(*words)  # copies the options
        finally:
            vector[0], vector[1], vector[2] = begin, end, capacity

    return _FUNCTION(construct)


def _with_option(begin: int, end: int) -> ctypes.Array[_Option] | None:
    """Return a copy of a server's options with one more; None if they are not as expected."""
    size = ctypes.sizeof(_Option)
    count, rest = divmod(end - begin, size)
    if not begin or rest or not 0 < count <= _MOST_OPTIONS:
        return None
    room = ctypes.string_at(begin, count * size) + bytes(size)
    options = (_Option * (count + 1)).from_buffer_copy(room)
    given = options[:count]
    if any(option.kind not in _KINDS for option in given):
        return None
    if not any(option.name == _KNOWN_OPTION for option in given):
        return None
    options[count] = _Option(_INTEGER, _OPTION, _NO_LIMIT, 0)
    return options
