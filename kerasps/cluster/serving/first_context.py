"""Opens the first context on a ps, so that each process that connects to it finds one there.

A context is what a server of TensorFlow holds for a process that is connected to it. A server that
has none makes anew, for the first, what runs collective operations, and frees that of before. Two
processes that connect at the same time both come first: then the context of one is left with what
has been freed for the other, and when it makes its next function ready the server crashes. The
workers of a cluster without a coordinator start at the same time. So a ps has a context from the
start, which nobody uses.
"""

from __future__ import annotations

import random
import struct
import warnings
from typing import Any

import grpc
from google.protobuf.wrappers_pb2 import BytesValue

# Of TensorFlow's eager_service.proto, which is not among the modules that it ships. The number of
# the context is field 7 of the request, of 64 bits.
_METHOD = "/tensorflow.eager.EagerService/CreateContext"
_CONTEXT_ID = 7 << 3 | 1
_TIME_LIMIT_S = 10.0


def open_first_context(server_def: Any, host: str, port: int) -> None:
    """Open a context, for good, in a server of this machine that nobody is connected to.

    Args:
        server_def: the server's `tf.train.ServerDef`.
        host: an IP address of this machine that the server listens on.
        port: the port that it listens on.

    Warns:
        RuntimeWarning: the server has refused.
    """
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    # A context of the task alone: nothing in it concerns the others.
    task_def = type(server_def)(
        job_name=server_def.job_name,
        task_index=server_def.task_index,
        protocol=server_def.protocol,
    )
    task_def.cluster.job.add(name=task_def.job_name).tasks[task_def.task_index] = address
    # The server definition is field 1, as is the value of a `BytesValue`, and on the wire bytes and
    # a message look alike. The context is kept for as long as the server lives, since no time is
    # given after which nobody uses it any more.
    request = BytesValue(value=task_def.SerializeToString()).SerializeToString()
    request += struct.pack("<BQ", _CONTEXT_ID, random.getrandbits(64))
    # A proxy that the environment names is for other machines.
    options = [("grpc.enable_http_proxy", 0)]
    try:
        with grpc.insecure_channel(address, options) as channel:
            channel.unary_unary(_METHOD)(request, timeout=_TIME_LIMIT_S)
    except grpc.RpcError as exc:
        warnings.warn(
            "This ps holds no context, so it may crash where several workers connect to it for "
            "the first time at the same time. Expected: TensorFlow's server to make one. Received: "
            f"{exc}. Start workers that drive their own steps one after the other.",
            RuntimeWarning,
            stacklevel=2,
        )
