"""Sets the gRPC options of connections between tasks. A server imports it, so it stays small."""

from __future__ import annotations

import os

from kerasps.checks import time_limit

_VARIABLE = "TF_GRPC_DEFAULT_OPTIONS"
# A task that does not answer for so long counts as hung. Long enough for a machine that swaps, or a
# process that gets no processor time.
_HANG_LIMIT_S = 10.0
# By default gRPC waits 20 s for a stopped server that accepts a connection and sends nothing. Each
# trace of a function makes a call to such a task, which blocks all threads for as long.
_CONNECT_MS = 2000
_MARGIN_MS = 1000
# A server counts pings that come within five minutes, and closes the connection at the fourth.
_RARE_PINGS_MS = 310_000

# The options that the user had set, and what `set_grpc_options` made of them.
_set = "", ""


def hang_limit() -> float:
    """Return the seconds after which a silent task hangs: KERASPS_HANG_TIMEOUT, or 10."""
    return time_limit(None, variable="KERASPS_HANG_TIMEOUT", default=_HANG_LIMIT_S)


def set_grpc_options(*, servers_limit_pings: bool | None = None) -> None:
    """Set gRPC options for this process's connections; options that the user set take precedence.

    With these options, a call that waits for a task which hangs ends, in every task that waits.
    TensorFlow makes some calls while it holds Python's lock, so only gRPC's threads can end them.
    Call before TensorFlow makes the first connection.

    Args:
        servers_limit_pings: whether a server to connect to refuses many pings
            (`cluster.serving.ping_limit`); then pings are so rare that none does. Default None: not
            known. Then gRPC sends two pings, and one a minute while nothing else is sent.
    """
    global _set
    limit_ms = int(hang_limit() * 1000)
    # Somewhat more than the limit. So the watch of the tasks can decide first, and a process that
    # was stopped for that time still receives the pending answers.
    answer_ms = limit_ms + _MARGIN_MS
    options = {
        "grpc.min_reconnect_backoff_ms": _CONNECT_MS,
        # Else gRPC would wait longer and longer before it reconnects to a silent task.
        "grpc.max_reconnect_backoff_ms": _CONNECT_MS,
        # A name may belong to another machine when a task restarts; gRPC's default is 30 s.
        "grpc.dns_min_time_between_resolutions_ms": _CONNECT_MS,
        # After a call without an answer gRPC sends a ping, whose answer has the limit above.
        "grpc.keepalive_time_ms": _RARE_PINGS_MS if servers_limit_pings else limit_ms // 4,
        "grpc.keepalive_timeout_ms": answer_ms,
        "grpc.http2.ping_timeout_ms": answer_ms,
    }
    if servers_limit_pings is False:
        options["grpc.http2.max_pings_without_data"] = 0  # no limit
    value = os.environ.get(_VARIABLE, "")
    given = _set[0] if value == _set[1] else value
    ours = [f"{name}={value}" for name, value in options.items() if name not in given]
    if ours:
        os.environ[_VARIABLE] = ",".join([given, *ours] if given else ours)
    _set = given, os.environ.get(_VARIABLE, "")
