"""Opens the first context on a ps, so that no process that connects to it makes the first one.

A TensorFlow server has a context for each connected process. When a server makes its first context,
it makes a new executor of collective operations and frees the previous one. If two processes
connect at the same time, both make a first context. Then one context refers to the executor that
was freed for the other, and the server crashes when it prepares the next function there. The
workers of a cluster without a coordinator start at the same time. So a ps gets a context at its
start, which nobody uses.
"""

from __future__ import annotations

import random
import struct
import warnings
from typing import Any

import grpc
from google.protobuf.wrappers_pb2 import BytesValue

# From TensorFlow's eager_service.proto, for which TensorFlow ships no module. The number of the
# context is field 7 of the request, with 64 bits.
_METHOD = "/tensorflow.eager.EagerService/CreateContext"
_CONTEXT_ID = 7 << 3 | 1
_TIME_LIMIT_S = 10.0


def open_first_context(server_def: Any, host: str, port: int) -> None:
    """Open a permanent context in a server of this machine before other processes connect to it."""
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    # The context contains only this task: it needs no other.
    task_def = type(server_def)(
        job_name=server_def.job_name,
        task_index=server_def.task_index,
        protocol=server_def.protocol,
    )
    task_def.cluster.job.add(name=task_def.job_name).tasks[task_def.task_index] = address
    # The server definition is field 1, as is the value of a `BytesValue`, and protobuf encodes
    # bytes and a message alike. The server keeps the context for ever, since the request has no
    # keep-alive time.
    request = BytesValue(value=task_def.SerializeToString()).SerializeToString()
    request += struct.pack("<BQ", _CONTEXT_ID, random.getrandbits(64))
    # A proxy that the environment sets is for other machines.
    options = [("grpc.enable_http_proxy", 0)]
    try:
        with grpc.insecure_channel(address, options) as channel:
            channel.unary_unary(_METHOD)(request, timeout=_TIME_LIMIT_S)
    except grpc.RpcError as exc:
        warnings.warn(
            "This ps has no context, so it may crash if several workers connect to it for the "
            "first time at the same time. Expected: TensorFlow's server to make one. Received: "
            f"{exc}. Start workers that drive their own steps one after the other.",
            RuntimeWarning,
            stacklevel=2,
        )
