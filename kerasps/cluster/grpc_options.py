"""How gRPC is to behave between tasks. Imports nothing, since a task's server does so first."""

from __future__ import annotations

import os

_VARIABLE = "TF_GRPC_DEFAULT_OPTIONS"
# gRPC waits 20 s for a server that accepts a connection and is silent, since it is stopped. A call
# to such a task, which every function that is traced makes, holds all threads up for as long.
_OPTIONS = {"grpc.min_reconnect_backoff_ms": 2000}


def set_grpc_options() -> None:
    """Have connections that this process makes from here on use our options, or the user's own.

    Call before TensorFlow makes the first.
    """
    given = os.environ.get(_VARIABLE, "")
    ours = [f"{name}={value}" for name, value in _OPTIONS.items() if name not in given]
    if ours:
        os.environ[_VARIABLE] = ",".join([given, *ours] if given else ours)
