"""Runs scripts in forks of a process that has imported TensorFlow, Keras and kerasps.

The imports take three seconds of a processor, and the tests run more than a hundred scripts. A fork
is a process like any other: it has its own arguments, environment, output and exit code. What
differs is that its `/proc/PID/environ` is that of the process it was forked from, and so is what
TensorFlow reads from the environment when it is imported.

The process that is forked runs this file. It receives one message for each script and replies on
the pipe that comes with the message: first the pid, then the exit code.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import types
from pathlib import Path

import numpy as np

import kerasps

MOST_BYTES = 1 << 20
# What TensorFlow and Keras read when they are imported.
AT_IMPORT = {"KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3"}


class ForkedScript:
    """A script that runs. Has what is needed of `subprocess.Popen`.

    Args:
        arguments: the path of the script, and its arguments.
        env: its whole environment.
        stdout, stderr: files with a descriptor, which the script gets.
    """

    def __init__(self, arguments, *, env, stdout, stderr):
        self.args = [str(argument) for argument in arguments]
        self.returncode = None
        read, write = os.pipe()
        # The pipe ends when the process that runs the script does, however it ends.
        self._replies = os.fdopen(read, "rb", buffering=0)
        self._unread = b""
        try:
            message = json.dumps({"arguments": self.args, "env": dict(env), "cwd": os.getcwd()})
            _template().send(message.encode(), [write, stdout.fileno(), stderr.fileno()])
        finally:
            os.close(write)
        self.pid = int(self._reply(60))

    def _reply(self, timeout_s):
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._unread:
            left = max(0.0, deadline - time.monotonic())
            if not select.select([self._replies], [], [], left)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout_s)
            received = self._replies.read(64)
            assert received, f"nobody runs {self.args}: the process that was to fork has ended"
            self._unread += received
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def poll(self):
        """The exit code, negative for a signal; None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout=1e6):
        """The exit code, once it has ended."""
        if self.returncode is None:
            self.returncode = int(self._reply(timeout))
            self._replies.close()
        return self.returncode

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)


class _Template:
    """The process that is forked; it ends when this one does."""

    def __init__(self):
        self._connection, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with there:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(there.fileno())],
                env={**os.environ, **AT_IMPORT},
                pass_fds=[there.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        atexit.register(self._close)

    def _close(self):
        self._connection.close()
        self._process.wait()

    def send(self, message, descriptors):
        socket.send_fds(self._connection, [message], descriptors)


@functools.cache
def _template():
    return _Template()


def _next_script(connection):
    """Forks for each message, and returns it in the fork; None when there will be no more."""
    # So the kernel collects the forks.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        message, descriptors, _, _ = socket.recv_fds(connection, MOST_BYTES, 3)
        if not message:
            return None
        if os.fork() == 0:
            connection.close()
            return json.loads(message), *descriptors
        for descriptor in descriptors:
            os.close(descriptor)


def _fork_and_tell(replies, *outputs):
    """Forks; returns in the fork. Here, tells its pid and, in the end, its exit code."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid == 0:
        os.close(replies)
        return
    for descriptor in outputs:
        os.close(descriptor)
    # Nobody may be left who reads it.
    with contextlib.suppress(BrokenPipeError):
        os.write(replies, b"%d\n" % pid)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os.write(replies, b"%d\n" % code)
    os._exit(0)


def _become(script, stdout, stderr):
    """Makes this process what `python script …` starts; returns the code, and where it runs."""
    for number, descriptor in enumerate((stdout, stderr), 1):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(script["cwd"])
    os.environ.clear()
    os.environ.update(script["env"])
    sys.argv = script["arguments"]
    path = Path(sys.argv[0])
    folders = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    sys.path[:1] = [str(path.resolve().parent), *(f for f in folders if f not in sys.path)]
    # Python seeds its `random` anew in each fork.
    np.random.seed()
    module = types.ModuleType("__main__")
    module.__file__ = str(path)
    sys.modules["__main__"] = module
    return compile(path.read_bytes(), str(path), "exec"), module.__dict__


def _import_all():
    for module in ("tensorflow", "keras"):
        importlib.import_module(module)
    # They are imported when they are asked for.
    for name in kerasps.__all__:
        getattr(kerasps, name)
    # No fork has to collect these objects, which stay.
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    _import_all()
    if (received := _next_script(socket.socket(fileno=int(sys.argv[1])))) is not None:
        _fork_and_tell(*received[1:])
        exec(*_become(received[0], *received[2:]))
