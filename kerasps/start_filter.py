"""Sends stderr through a process that drops the lines of TensorFlow's start.

A thread could not read TensorFlow's lines, since TensorFlow holds Python's lock while it writes
them. And if this process crashes, the other one still passes on everything written before.
"""

from __future__ import annotations

import contextlib
import glob
import os
import select
import subprocess
import sys
from pathlib import Path

# The limit for the filter to read what was written. On a machine that swaps, lines may come later.
_DRAIN_MS = 2000
# The filter ends at once when no process can write to it any more.
_END_S = 0.1
_NVIDIA = "0x10de"
_DISPLAY_CLASS = "0x03"

# Filters still in use by child processes that were started meanwhile and inherited stderr.
_lasting: list[subprocess.Popen[bytes]] = []


class StartFilter:
    """A process that reads what this one writes to file descriptor 2, until `end` is called.

    Raises:
        OSError: this process has no stderr, or can start no process.
    """

    def __init__(self) -> None:
        _lasting[:] = [process for process in _lasting if process.poll() is None]
        self._end = f"<{os.urandom(16).hex()}>"
        self._stderr = os.dup(2)
        read_fd, self._write_fd = os.pipe()
        self._done_fd, tell_fd = os.pipe()
        try:
            self._process = self._started(read_fd, tell_fd)
        except BaseException:
            for fd in (self._stderr, self._write_fd, self._done_fd):
                os.close(fd)
            raise
        finally:
            # With the filter as the only reader, a write fails once it has ended, and never waits.
            os.close(read_fd)
            os.close(tell_fd)
        _flush()
        os.dup2(self._write_fd, 2)

    def end(self) -> None:
        """Restore stderr, and wait until the filter has passed on everything written to it."""
        _flush()
        os.dup2(self._stderr, 2)
        os.close(self._stderr)
        with contextlib.suppress(OSError):
            os.write(self._write_fd, self._end.encode())
        os.close(self._write_fd)
        poller = select.poll()
        poller.register(self._done_fd, select.POLLIN)
        poller.poll(_DRAIN_MS)
        os.close(self._done_fd)
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            # A process that was started meanwhile has the pipe, so the filter keeps running.
            _lasting.append(self._process)

    def _started(self, read_fd: int, tell_fd: int) -> subprocess.Popen[bytes]:
        if not sys.executable or getattr(sys, "frozen", False):
            # A frozen application would start itself.
            raise FileNotFoundError("no Python")
        script = str(Path(__file__).with_name("start_lines.py"))
        fds = [self._stderr, tell_fd]
        return subprocess.Popen(
            # -I and -S: it imports none of the user's modules, and starts fast.
            [
                sys.executable,
                "-I",
                "-S",
                script,
                *map(str, fds),
                self._end,
                str(int(may_use_gpu())),
            ],
            stdin=read_fd,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=fds,
            # Ctrl-C in the terminal must not end the filter before it passes the last lines.
            start_new_session=True,
        )


def may_use_gpu() -> bool:
    """Return True if this machine has an NVIDIA GPU, with or without a driver, that is not hidden.

    Only then does the filter pass TensorFlow's lines about not using a GPU.
    """
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and (not hidden.strip() or hidden.strip().startswith("-1")):
        return False
    if os.environ.get("NVIDIA_VISIBLE_DEVICES") in ("none", "void"):
        return False
    if glob.glob("/dev/nvidia[0-9]*") or glob.glob("/dev/dxg"):
        return True
    for vendor in glob.glob("/sys/bus/pci/devices/*/vendor"):
        with contextlib.suppress(OSError):
            if Path(vendor).read_text().strip() != _NVIDIA:
                continue
            if Path(vendor).with_name("class").read_text().startswith(_DISPLAY_CLASS):
                return True
    return False


def _flush() -> None:
    with contextlib.suppress(Exception):  # it may be closed, or an object of the user's
        sys.stderr.flush()
