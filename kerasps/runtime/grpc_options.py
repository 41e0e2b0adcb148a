"""The gRPC options of connections between tasks. Imports nothing heavy: a server imports it."""

from __future__ import annotations

import os

from kerasps.checks import time_limit

_VARIABLE = "TF_GRPC_DEFAULT_OPTIONS"
# A task that does not answer for so long hangs. Long enough for a machine that swaps, or a process
# that is starved of its processors.
_HANG_LIMIT_S = 10.0
# gRPC waits 20 s for a server that accepts a connection and is silent, since it is stopped. A call
# to such a task, which every function that is traced makes, holds all threads up for as long.
_CONNECT_MS = 2000
_MARGIN_MS = 1000


def hang_limit() -> float:
    """Return the seconds after which a silent task hangs: KERASPS_HANG_TIMEOUT, else 10."""
    return time_limit(None, variable="KERASPS_HANG_TIMEOUT", default=_HANG_LIMIT_S)


def set_grpc_options() -> None:
    """Set the options of connections that this process makes from here on: ours, or the user's.

    A call that waits for a task which hangs ends then, in every task that waits. TensorFlow makes
    some calls while it holds Python's lock, so that nothing but gRPC's own threads could end them.
    Call before TensorFlow makes the first connection.
    """
    limit_ms = int(hang_limit() * 1000)
    # Some more than the limit: until then, who watches the tasks may say what becomes of it, and a
    # process that was stopped for as long has not missed the answers that wait for it.
    answer_ms = limit_ms + _MARGIN_MS
    options = {
        "grpc.min_reconnect_backoff_ms": _CONNECT_MS,
        # Or who was silent for a while would be asked anew after ever longer times.
        "grpc.max_reconnect_backoff_ms": _CONNECT_MS,
        # A name may be that of another machine when a task comes back; gRPC looks every 30 s.
        "grpc.dns_min_time_between_resolutions_ms": _CONNECT_MS,
        # A call without an answer is followed by a ping, which has the limit for its own answer.
        "grpc.keepalive_time_ms": limit_ms // 4,
        "grpc.keepalive_timeout_ms": answer_ms,
        "grpc.http2.ping_timeout_ms": answer_ms,
    }
    given = os.environ.get(_VARIABLE, "")
    ours = [f"{name}={value}" for name, value in options.items() if name not in given]
    if ours:
        os.environ[_VARIABLE] = ",".join([given, *ours] if given else ours)
