"""Asks the tasks of a cluster to record their events, and fetches the recordings.

Every server of TensorFlow offers a `ProfilerService`: workers, ps and coordinator alike. It records
from a request until a second one stops it, or for a minute. It returns the files of TensorFlow's
profiler, and writes nothing on the machines of the tasks. TensorFlow's client of this service
cannot stop early (docs/decisions/0047).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from google.protobuf import descriptor_pb2, message_factory

from kerasps import _compat
from kerasps.tools.tracing.clocks import Asked
from kerasps.tools.tracing.steps import Task

if TYPE_CHECKING:
    import grpc

_PROFILE = "/tensorflow.ProfilerService/Profile"
_TERMINATE = "/tensorflow.ProfilerService/Terminate"
# From TensorFlow's profiler_service.proto, for which TensorFlow ships no Python module: the fields
# that are used, with their numbers and types. `ProfileOptions` and `XSpace` are messages.
_UINT64, _STRING, _BYTES, _BOOL = 4, 9, 12, 8
_FIELDS = {
    "ProfileRequest": {
        "duration_ms": (1, _UINT64),
        "opts": (4, _BYTES),
        "session_id": (6, _STRING),
        "host_name": (7, _STRING),
        "emit_xspace": (9, _BOOL),
    },
    "ProfileResponse": {"xspace": (8, _BYTES)},
    "TerminateRequest": {"session_id": (1, _STRING)},
}
# A recording grows with every operation: a minute of small steps is some 100 MB on a ps.
MAX_SECONDS = 60.0
# A task answers within milliseconds, and sends its recording within seconds.
_ANSWER_S = 10.0
_FETCH_S = 60.0
# The time for a cancelled call to end in this process.
_CANCEL_S = 1.0
# How often to look whether gRPC's thread has ended.
_WATCHER_S = 0.01


@dataclass
class _Answer:
    """The answer of a task: a serialized `XSpace`, or the reason why there is none."""

    content: bytes | None = None
    reason: str = ""
    # The times of the request and of the answer.
    asked: Asked | None = None
    # Whether the request has reached the task, or has failed.
    is_reached: bool = False


class Recording:
    """Records the events of a cluster's tasks, from `start` to `stop`."""

    def __init__(self, addresses: Mapping[Task, str], session: str) -> None:
        self._addresses = dict(addresses)
        self._session = session
        self._answers: dict[Task, _Answer] = {}
        self._threads: dict[Task, threading.Thread] = {}
        self._calls: dict[Task, Any] = {}

    def start(self) -> None:
        """Ask every task to begin, without waiting for any."""
        # Imported late: it takes 0.15 s, and only traces need it.
        import grpc

        for task, address in self._addresses.items():
            channel = grpc.insecure_channel(
                address,
                # No proxy: those of the environment are for other machines.
                [("grpc.enable_http_proxy", 0), ("grpc.max_receive_message_length", -1)],
            )
            answer = self._answers[task] = _Answer(reason="it did not answer")
            thread = threading.Thread(
                target=self._record,
                args=[task, channel, answer],
                name="kerasps-trace",
                daemon=True,
            )
            self._threads[task] = thread
            thread.start()

    def stop(self, answer_s: float = _ANSWER_S, fetch_s: float = _FETCH_S) -> None:
        """Tell every task to stop, and wait for the recordings."""
        import grpc

        request = _MESSAGES["TerminateRequest"](session_id=self._session).SerializeToString()
        told = []
        for task, thread in self._threads.items():
            if thread.is_alive():
                channel = grpc.insecure_channel(
                    self._addresses[task], [("grpc.enable_http_proxy", 0)]
                )
                told.append((channel, channel.unary_unary(_TERMINATE).future(request, answer_s)))
        for channel, call in told:
            with contextlib.suppress(grpc.RpcError):  # the answer to the first call has the error
                call.result()
            channel.close()
        deadline = time.monotonic() + fetch_s
        for task, thread in self._threads.items():
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive() and task in self._calls:
                self._calls[task].cancel()
                thread.join(_CANCEL_S)

    @property
    def has_begun(self) -> bool:
        """True once every reachable task has received the request to begin."""
        return all(answer.is_reached for answer in self._answers.values())

    @property
    def contents(self) -> dict[Task, bytes]:
        """The serialized `XSpace` of each task that has answered."""
        return {
            t: answer.content for t, answer in self._answers.items() if answer.content is not None
        }

    @property
    def missing(self) -> dict[Task, str]:
        """The reason for each task without a recording."""
        return {t: answer.reason for t, answer in self._answers.items() if answer.content is None}

    @property
    def asked(self) -> dict[Task, Asked]:
        """The times when each task was asked and when it answered."""
        return {
            task: answer.asked for task, answer in self._answers.items() if answer.asked is not None
        }

    def _record(self, task: Task, channel: grpc.Channel, answer: _Answer) -> None:
        import grpc

        def note(state: grpc.ChannelConnectivity) -> None:
            answer.is_reached |= state is grpc.ChannelConnectivity.READY

        channel.subscribe(note)
        begin = time.time_ns()
        call = channel.unary_unary(_PROFILE).future(
            _profile_request(self._session, f"{task[0]}-{task[1]}"),
            timeout=MAX_SECONDS + _FETCH_S,
        )
        self._calls[task] = call
        try:
            response = call.result()
        except grpc.RpcError as exc:
            details = str(exc.details()) if isinstance(exc, grpc.Call) else str(exc)
            answer.reason = details.rstrip(". ")
        except grpc.FutureCancelledError:
            answer.reason = "it did not send its recording"
        else:
            answer.asked = Asked(begin, time.time_ns())
            answer.content = _MESSAGES["ProfileResponse"].FromString(response).xspace or None
            answer.reason = "it records for another process, or cannot record"
        answer.is_reached = True
        channel.unsubscribe(note)
        # gRPC's thread that watches the connection raises if it meets a closed channel. It ends
        # soon after the last subscription. If gRPC no longer says so, close at once.
        watched = getattr(channel, "_connectivity_state", None)
        while getattr(watched, "polling", False):
            time.sleep(_WATCHER_S)
        channel.close()


def _profile_request(session: str, host: str) -> bytes:
    duration_ms = int(MAX_SECONDS * 1000)
    options = _compat.ProfileOptions(
        version=1,
        # 2, the default, records every operation; then a GPU's kernels, and nothing of Python.
        host_tracer_level=2,
        device_tracer_level=1,
        include_dataset_ops=True,
        duration_ms=duration_ms,
    )
    request: bytes = _MESSAGES["ProfileRequest"](
        duration_ms=duration_ms,
        opts=options.SerializeToString(),
        session_id=session,
        host_name=host,
        emit_xspace=True,
    ).SerializeToString()
    return request


def _messages() -> dict[str, Any]:
    """Return the class of each message in `_FIELDS`."""
    file = descriptor_pb2.FileDescriptorProto(name="kerasps/profiler_service.proto")
    for name, fields in _FIELDS.items():
        message = file.message_type.add(name=name)
        for field, (number, kind) in fields.items():
            message.field.add(name=field, number=number, type=kind, label=1)
    return dict(message_factory.GetMessages([file]))


_MESSAGES = _messages()
