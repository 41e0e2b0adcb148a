"""Runs scripts in forks of a process that has imported TensorFlow, Keras and kerasps, and the tasks
of their clusters.

The imports take three seconds of a processor, those of a task half a second, and the tests run more
than a hundred scripts. A fork is a process like any other: it has its own arguments, environment,
output and exit code. What differs is that its `/proc/PID/environ` is that of the process it was
forked from, and so is what TensorFlow reads from the environment when it is imported. So tasks
start as they do for users where a test finds them by a mark in their environment, or has TensorFlow
log otherwise.

The process that is forked runs this file. It receives one message for each script or task and
replies on the pipe that comes with the message: first the pid, then the exit code.
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
import threading
import time
import types
import uuid
from pathlib import Path

import numpy as np

import kerasps
from kerasps.cluster import server
from kerasps.cluster.processes import process as task_process

MOST_BYTES = 1 << 20
# Inherited by every process that a test starts, so that those which it left can be found whoever
# their parent is by then.
MARK = "KERASPS_TEST_MARK"
# What TensorFlow and Keras read when they are imported.
AT_IMPORT = {"KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3"}


def is_alive(pid):
    """Whether a process runs; one that only waits for its parent to collect it does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


class _Fork:
    """A process that was forked. Has what is needed of `subprocess.Popen`.

    Args:
        send: sends a message and the descriptors that go with it to the process that forks.
        message: what is to run.
        descriptors: its files.
    """

    def __init__(self, send, message, descriptors):
        self.args = message["arguments"]
        self.returncode = None
        self._reading = threading.Lock()
        read, write = os.pipe()
        # The pipe ends when the process that runs the script does, however it ends.
        self._replies = os.fdopen(read, "rb", buffering=0)
        self._unread = b""
        try:
            send(json.dumps({**message, "cwd": os.getcwd()}).encode(), [write, *descriptors])
        finally:
            os.close(write)
        self.pid = int(self._reply())

    def _reply(self, timeout_s=None):
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while b"\n" not in self._unread:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([self._replies], [], [], left)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout_s)
            received = self._replies.read(64)
            assert received, f"nobody runs {self.args}: the process that was to fork has ended"
            self._unread += received
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def poll(self):
        """The exit code, negative for a signal; None while it runs."""
        # Of a process that has ended, the reply may come a moment later.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0 if is_alive(self.pid) else None)
        return self.returncode

    def wait(self, timeout=None):
        """The exit code, once it has ended."""
        with self._reading:
            if self.returncode is None:
                self.returncode = int(self._reply(timeout))
                self._replies.close()
        return self.returncode

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)


class ForkedScript(_Fork):
    """A script that runs.

    Args:
        arguments: the path of the script, and its arguments.
        env: its whole environment.
        stdout, stderr: files with a descriptor, which the script gets.
    """

    def __init__(self, arguments, *, env, stdout, stderr):
        message = {"arguments": [str(argument) for argument in arguments], "env": dict(env)}
        super().__init__(_template().send, message, [stdout.fileno(), stderr.fileno()])


class _ForkedTask(_Fork):
    """A task of the cluster of a forked script; takes what `TaskProcess` gives to `Popen`."""

    def __init__(self, command, *, stdin, stdout, stderr, env, pass_fds, start_new_session):
        assert command[:3] == [sys.executable, "-m", server.__name__]
        assert (stdin, stderr, start_new_session) == (subprocess.PIPE, subprocess.STDOUT, True)
        (report,) = pass_fds
        # The number that it has in this process is of another file there.
        arguments = [server.REPORT_FD_FLAG, server.WATCH_PARENT_FLAG]
        assert command[3:] == [arguments[0], str(report), arguments[1]]
        read, write = os.pipe()
        self.stdin = os.fdopen(write, "wb", buffering=0)
        try:
            message = {"arguments": arguments, "env": dict(env)}
            super().__init__(self._send, message, [stdout.fileno(), read, report])
        finally:
            os.close(read)

    @staticmethod
    def _send(message, descriptors):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.connect(_TASKS_AT)
            socket.send_fds(connection, [message], descriptors)


def _popen_of_tasks(command, *, env, **arguments):
    """Start a task: as for users where tests see in its environment, or TensorFlow in its own."""
    read_at_import = {name: env[name] for name in env if name.startswith("TF_CPP_")}
    is_forked = MARK not in env and read_at_import.items() <= AT_IMPORT.items()
    return (_ForkedTask if is_forked else subprocess.Popen)(command, env=env, **arguments)


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


def _next_fork(connection):
    """Forks for each message, and returns it in the fork; None when there will be no more."""
    # So the kernel collects the forks.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    tasks = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    tasks.bind(_TASKS_AT)
    tasks.listen(64)
    while True:
        for ready in select.select([connection, tasks], [], [])[0]:
            sender = ready if ready is connection else tasks.accept()[0]
            message, descriptors, _, _ = socket.recv_fds(sender, MOST_BYTES, 4)
            if ready is connection and not message:
                return None
            if message and os.fork() == 0:
                for each in (connection, tasks, sender):
                    each.close()
                return json.loads(message), *descriptors
            for descriptor in descriptors:
                os.close(descriptor)
            if ready is tasks:
                sender.close()


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


def _take(message, **descriptors):
    """Take over the directory, the environment and these files of the standard ones."""
    for name, descriptor in descriptors.items():
        os.dup2(descriptor, ("stdin", "stdout", "stderr").index(name))
    for descriptor in {*descriptors.values()}:
        os.close(descriptor)
    os.chdir(message["cwd"])
    os.environ.clear()
    os.environ.update(message["env"])


def _serve(task, log, stdin, report):
    """Be the task that `TaskProcess` starts."""
    os.setsid()
    _take(task, stdin=stdin, stdout=log, stderr=log)
    flag, *others = task["arguments"]
    server.main([flag, str(report), *others])


def _become(script, stdout, stderr):
    """Makes this process what `python script …` starts; returns the code, and where it runs."""
    _take(script, stdout=stdout, stderr=stderr)
    task_process.subprocess = types.SimpleNamespace(
        **{**vars(subprocess), "Popen": _popen_of_tasks}
    )
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
    _TASKS_AT = f"\0kerasps-tests-{uuid.uuid4()}"
    _import_all()
    received = _next_fork(socket.socket(fileno=int(sys.argv[1])))
    if received is not None:
        message, *descriptors = received
        _fork_and_tell(*descriptors)
        if len(descriptors) == 4:
            _serve(message, *descriptors[1:])
        else:
            exec(*_become(message, *descriptors[1:]))
