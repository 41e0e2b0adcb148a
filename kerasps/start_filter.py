"""Leads stderr through a process that drops the lines of TensorFlow's start.

A thread could not read what TensorFlow writes: it writes while it holds Python's lock. And where
this process crashes, what it has written passes all the same.
"""

from __future__ import annotations

import contextlib
import glob
import os
import select
import subprocess
import sys
from pathlib import Path

# The filter has read by then what was written; on a machine that swaps, lines come a little later.
_DRAIN_MS = 2000
# The filter ends at once when nobody can write to it any more.
_END_S = 0.1
_NVIDIA = "0x10de"
_DISPLAY_CLASS = "0x03"

# Filters that processes hold open which were started meanwhile, and that have stderr from here.
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
            # With no reader but the filter, a write fails where that one is gone. It never waits.
            os.close(read_fd)
            os.close(tell_fd)
        _flush()
        os.dup2(self._write_fd, 2)

    def end(self) -> None:
        """Give stderr back, and wait until all that was written to it has passed."""
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
            # A process that was started meanwhile has the pipe, and the filter goes on for it.
            _lasting.append(self._process)

    def _started(self, read_fd: int, tell_fd: int) -> subprocess.Popen[bytes]:
        if not sys.executable or getattr(sys, "frozen", False):
            # A frozen application would start itself.
            raise FileNotFoundError("no Python")
        script = str(Path(__file__).with_name("start_lines.py"))
        fds = [self._stderr, tell_fd]
        return subprocess.Popen(
            # -I and -S: it imports nothing of the user's, and starts fast.
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
            # Ctrl-C in the terminal is for the script, whose last words are still to pass.
            start_new_session=True,
        )


def may_use_gpu() -> bool:
    """Return whether this machine has an NVIDIA GPU, with a driver or without, that is not hidden.

    TensorFlow's lines that it uses no GPU are worth showing there, and nowhere else.
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
    with contextlib.suppress(Exception):  # it may be closed, or of a class of the user's
        sys.stderr.flush()
