"""Drops the lines that TensorFlow prints while it starts, and passes all others on in order.

`kerasps.start_filter` runs this file as a process, which reads the stderr of another process. So
nothing is lost if that process crashes, and its writes do not wait for a thread of its interpreter.
The file imports nothing of kerasps and starts in some 10 ms.
"""

from __future__ import annotations

import os
import select
import signal
import sys

# An incomplete line passes after this time: it may be a prompt that a user has to answer.
_PARTIAL_MS = 100
_READ_BYTES = 65536

_BANNER = b"WARNING: All log messages before absl::InitializeLog() is called are written to STDERR"
_INSTRUCTIONS = (
    b"To enable the following instructions: ",
    b", rebuild TensorFlow with the appropriate",
)
# The beginnings of messages that no user can act upon, by the source file that prints them.
# No regular expressions: their module takes as long to import as the rest.
_ALWAYS = {
    b"port.cc": (b"oneDNN custom operations are on",),
    b"cpu_feature_guard.cc": (b"This TensorFlow binary is optimized to use available CPU",),
    b"cuda_fft.cc": (b"Unable to register cuFFT factory",),
    b"cuda_dnn.cc": (b"Unable to register cuDNN factory",),
    b"cuda_blas.cc": (b"Unable to register cuBLAS factory",),
    b"computation_placer.cc": (b"computation placer already registered",),
    b"py_utils.cc": (b"TF-TRT Warning: Could not find TensorRT",),
    b"gpu_device.cc": (b"Created device ",),
    b"cuda_executor.cc": (b"successful NUMA node read from SysFS",),
    b"grpc_server_lib.cc": (b"Started server with target",),
}
# Messages that TensorFlow uses no GPU: shown only if the machine has one.
_INIT = b"failed call to cuInit: "
_WITHOUT_GPU = {
    b"cudart_stub.cc": (b"Could not find cuda drivers on your machine",),
    b"cuda_platform.cc": (_INIT,),
    b"cuda_driver.cc": (_INIT,),
    b"cuda_executor.cc": (_INIT,),
    b"cuda_diagnostics.cc": (
        b"retrieving CUDA diagnostic information for host: ",
        b"hostname: ",
        b"libcuda reported version is: ",
        b"kernel reported version is: ",
        b"kernel driver does not appear to be running on this host",
        b"no NVIDIA GPU device is present",
    ),
}


def is_of_start(line: bytes, *, has_gpu: bool) -> bool:
    """Return True for a line of TensorFlow's start that has no use for the user.

    Args:
        line: the line, or the part of it that has arrived.
        has_gpu: whether this process may use a GPU. Lines about not using a GPU then pass.
    """
    if line.startswith(_BANNER):
        return True
    if line.startswith(_INSTRUCTIONS[0]):
        return _INSTRUCTIONS[1] in line
    head, _, message = line.partition(b"] ")
    # The format of absl, "I0000 00:00:1795775537.766145 32111 port.cc:153] oneDNN…", and the older
    # one of TensorFlow, "2025-08-21 10:00:00.123456: I tensorflow/core/util/port.cc:153] …".
    before, _, place = head.rpartition(b" ")
    is_log = before[:1] in (b"I", b"W", b"E") and before[1:5].isdigit()
    is_log = is_log or (before[:4].isdigit() and before[-3:] in (b": I", b": W", b": E"))
    file, _, number = place.rpartition(b"/")[2].partition(b":")
    if not is_log or not number.isdigit():
        return False
    if message.startswith(_ALWAYS.get(file, (b"\n",))):
        return True
    return not has_gpu and message.startswith(_WITHOUT_GPU.get(file, (b"\n",)))


class LineFilter:
    """Takes bytes as they arrive, and returns those to pass on.

    Args:
        has_gpu: whether this process may use a GPU; see `is_of_start`.
        end: marks the end: bytes behind it pass unchanged.
    """

    def __init__(self, *, has_gpu: bool, end: bytes) -> None:
        self._has_gpu = has_gpu
        self._end = end
        self._rest = b""
        # True if the beginning of the current line has passed already.
        self._is_inside = False
        self.has_ended = False

    @property
    def waits(self) -> bool:
        """True if the filter holds back an incomplete line that may pass before its end."""
        return bool(self._rest) and (self._is_inside or not self._is_dropped(self._rest))

    def feed(self, data: bytes) -> bytes:
        """Return the bytes that pass after `data` has arrived."""
        if self.has_ended:
            return data
        before, mark, behind = (self._rest + data).partition(self._end)
        *lines, self._rest = before.split(b"\n")
        passed = b""
        for line in lines:
            if self._is_inside or not self._is_dropped(line):
                passed += line + b"\n"
            self._is_inside = False
        if mark:
            self.has_ended = True
            passed += self.flush() + behind
        return passed

    def flush(self) -> bytes:
        """Return the bytes held back, unless they begin a line to drop."""
        held = self._rest
        if not held or (not self._is_inside and self._is_dropped(held)):
            return b""
        self._rest, self._is_inside = b"", True
        return held

    def _is_dropped(self, line: bytes) -> bool:
        return is_of_start(line, has_gpu=self._has_gpu)


def main() -> None:
    """Copy stdin to a file descriptor until no process can write to it any more."""
    target, done = int(sys.argv[1]), int(sys.argv[2])
    # It ends after the processes that write to it: an earlier end would lose their last lines.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    lines = LineFilter(has_gpu=sys.argv[4] == "1", end=sys.argv[3].encode())
    poller = select.poll()
    poller.register(0, select.POLLIN | select.POLLHUP)
    while True:
        if lines.waits and not poller.poll(_PARTIAL_MS):
            _write(target, lines.flush())
            continue
        data = os.read(0, _READ_BYTES)
        had_ended = lines.has_ended
        _write(target, lines.feed(data) if data else lines.flush())
        if lines.has_ended and not had_ended:
            os.write(done, b"\n")
        if not data:
            # A normal exit of the interpreter would take as long as all this.
            os._exit(0)


def _write(target: int, data: bytes) -> None:
    while data:
        try:
            data = data[os.write(target, data) :]
        except BlockingIOError:  # a process has made the terminal non-blocking
            select.select([], [target], [])
        except OSError:  # it has no reader any more
            return


if __name__ == "__main__":
    main()
