"""Asks the tasks of a cluster to record their events, and fetches the recordings.

Every server of TensorFlow offers a `ProfilerService`: workers, ps and coordinator alike. It records
from a request until a second one stops it, or for a minute. It returns the files of TensorFlow's
profiler, and writes nothing on the machines of the tasks.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kerasps import _compat
from kerasps.tracing.clocks import Asked
from kerasps.tracing.steps import Task

if TYPE_CHECKING:
    import grpc

# From TensorFlow's profiler_service.proto, for which TensorFlow ships no Python module.
_PROFILE = "/tensorflow.ProfilerService/Profile"
_TERMINATE = "/tensorflow.ProfilerService/Terminate"
_DURATION, _OPTIONS, _SESSION, _HOST, _EMIT = 1, 4, 6, 7, 9  # of a ProfileRequest
_ENDED_SESSION = 1  # of a TerminateRequest
_SPACE = 8  # of a ProfileResponse
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
    """The answer of a task: a serialized `XSpace`, or the reason why there is none.

    Attributes:
        content: the `XSpace`.
        reason: the reason why there is none.
        asked: the times of the request and of the answer.
        is_reached: whether the request has reached the task, or has failed.
    """

    content: bytes | None = None
    reason: str = ""
    asked: Asked | None = None
    is_reached: bool = False


class Recording:
    """Records the events of a cluster's tasks, from `start` to `stop`.

    Args:
        addresses: the `"host:port"` of each task.
        session: a unique name for the recording.
    """

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
        """Tell every task to stop, and wait for the recordings.

        Args:
            answer_s: the seconds for a task to answer. Default 10.
            fetch_s: the seconds for all tasks to send their recordings. Default 60.
        """
        import grpc

        request = _field(_ENDED_SESSION, self._session.encode())
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
            answer.content = _content_of(response)
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
    return b"".join(
        [
            _field(_DURATION, duration_ms),
            _field(_OPTIONS, options.SerializeToString()),
            _field(_SESSION, session.encode()),
            _field(_HOST, host.encode()),
            _field(_EMIT, 1),
        ]
    )


def _field(number: int, value: int | bytes) -> bytes:
    """Return one field of a message in the format of protocol buffers."""
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    written = bytearray()
    while value > 0x7F:
        written.append(value & 0x7F | 0x80)
        value >>= 7
    written.append(value)
    return bytes(written)


def _content_of(response: bytes) -> bytes | None:
    """Return the `XSpace` in a `ProfileResponse`; None if it is missing or empty."""
    position = 0
    while position < len(response):
        tag, position = _read_varint(response, position)
        if tag & 7 == 0:
            _, position = _read_varint(response, position)
            continue
        size, position = _read_varint(response, position)
        if tag >> 3 == _SPACE:
            return response[position : position + size] or None
        position += size
    return None


def _read_varint(content: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = content[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
