"""The sockets by which `kerasps top` finds the runs of this user on this machine.

Each process with a strategy listens on a Unix socket, whose name is its process id, in a directory
that only its user may enter. It sends each client a status as JSON, and closes the connection.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_LOGGER = logging.getLogger("kerasps")

_SUFFIX = ".sock"
# A status may wait 1.5 seconds for a ps that hangs.
REPLY_S = 5.0
_MAX_BYTES = 2**26


def directories() -> list[Path]:
    """Return the directories where sockets may be, the first choice first.

    A scheduler's job often lacks XDG_RUNTIME_DIR, while the shell that runs `kerasps top` has it.
    So callers try all directories.
    """
    user = os.getuid()
    runtime = [os.environ.get("XDG_RUNTIME_DIR"), f"/run/user/{user}"]
    found = [Path(path) / "kerasps" for path in runtime if path and os.access(path, os.W_OK)]
    with contextlib.suppress(FileNotFoundError):  # no directory has room for a file
        found.append(Path(tempfile.gettempdir()) / f"kerasps-{user}")
    found.append(Path("/tmp") / f"kerasps-{user}")
    return list(dict.fromkeys(found))


def _is_private(directory: Path) -> bool:
    """Return True if a path is a directory of this user that only this user may enter."""
    try:
        status = os.lstat(directory)
    except OSError:
        return False
    is_ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    return is_ours and not status.st_mode & 0o077


@contextlib.contextmanager
def _short_path(path: Path) -> Iterator[str]:
    """Yield a path to a socket that fits the system's limit, for a directory of any depth."""
    directory = os.open(path.parent, os.O_DIRECTORY | os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)


class StatusSocket:
    """Answers `kerasps top` on this machine, in a thread that sleeps until a client connects.

    Args:
        answer: returns the reply, for JSON. Thread: the one of this socket.
    """

    def __init__(self, answer: Callable[[], Mapping[str, object]]) -> None:
        self._answer = answer
        self._listener: socket.socket | None = None
        # The path of the socket; None while it does not listen.
        self.path: Path | None = None
        self._inode = 0
        self._owner = os.getpid()
        self._replying = threading.Lock()

    def start(self) -> None:
        """Listen. If no directory can be used, log that and do nothing."""
        errors = []
        # Try each twice: the last process to leave a directory removes it, perhaps just now.
        for directory in [place for place in directories() for _ in range(2)]:
            try:
                _remove_stale(directory)
                self._listen(directory)
            except OSError as exc:
                errors.append(f"{directory}: {exc}")
            else:
                break
        else:
            _LOGGER.info("`kerasps top` cannot find this process: %s.", "; ".join(errors))
            return
        name = "kerasps-status-socket"
        threading.Thread(target=self._serve, args=(self._listener,), name=name, daemon=True).start()

    def _listen(self, directory: Path) -> None:
        with contextlib.suppress(FileExistsError):
            directory.mkdir(mode=0o700)
        if not _is_private(directory):
            raise PermissionError("it is not a directory that only this user may enter")
        path = directory / f"{os.getpid()}{_SUFFIX}"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # It gets its name after it listens: before, its process would seem to have ended.
        unnamed = path.with_suffix(".new")
        try:
            unnamed.unlink(missing_ok=True)  # of an earlier process with this id
            with _short_path(unnamed) as short:
                listener.bind(short)
            listener.listen()
            # Fails if the name exists: a process with this id runs in another container.
            os.link(unnamed, path)
            unnamed.unlink()
        except BaseException:
            listener.close()
            raise
        self._listener, self.path, self._inode = listener, path, os.lstat(path).st_ino

    def _serve(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return  # closed
            with connection, contextlib.suppress(OSError), self._replying:
                connection.settimeout(REPLY_S)
                connection.sendall(self._reply())

    def _reply(self) -> bytes:
        try:
            return json.dumps(self._answer()).encode()
        except Exception as exc:  # such as while the cluster closes
            return json.dumps({"error": f"{type(exc).__name__}: {exc}"}).encode()

    def close(self) -> None:
        """Stop listening, and wait for a reply in flight. A second call does nothing."""
        listener, path = self._listener, self.path
        self._listener = self.path = None
        if listener is None or path is None or self._owner != os.getpid():
            return  # a fork leaves the socket to its parent
        with contextlib.suppress(OSError):
            if os.lstat(path).st_ino == self._inode:
                path.unlink()
            path.parent.rmdir()  # fails if other sockets are in it
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        listener.close()
        # A process that ends while a thread is in TensorFlow may crash.
        if self._replying.acquire(timeout=REPLY_S):
            self._replying.release()


@dataclass(frozen=True)
class RunningProcess:
    """A process with a strategy, and its reply."""

    pid: int
    reply: dict[str, Any]


def ask_running(pid: int | None = None) -> list[RunningProcess]:
    """Return this user's processes with a strategy on this machine, sorted by process id.

    It removes the sockets of processes that have ended.
    """
    found = {}
    for path in (path for directory in directories() for path in _socket_files(directory)):
        number = int(path.name.removesuffix(_SUFFIX))
        if pid in (None, number) and number not in found:
            reply = _ask(path)
            if reply is not None:
                found[number] = RunningProcess(number, reply)
    return [process for _, process in sorted(found.items())]


def remove_stale_sockets() -> None:
    """Remove the sockets of killed processes, and directories without sockets."""
    for directory in directories():
        _remove_stale(directory)
        if _is_private(directory):
            with contextlib.suppress(OSError):
                directory.rmdir()


def _remove_stale(directory: Path) -> None:
    for path in _socket_files(directory):
        with contextlib.suppress(OSError), _connected(path):
            pass


def _socket_files(directory: Path) -> Iterator[Path]:
    if _is_private(directory):
        for path in sorted(directory.glob(f"*{_SUFFIX}")):
            if path.name.removesuffix(_SUFFIX).isdecimal():
                yield path


@contextlib.contextmanager
def _connected(path: Path) -> Iterator[socket.socket]:
    """Connect to a process; remove its socket if no process listens, since its process ended.

    The process id cannot tell: the process may be in another container that shares this directory.

    Raises OSError if the process has ended, or does not accept.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(REPLY_S)
        try:
            with _short_path(path) as short:
                connection.connect(short)
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            raise
        yield connection


def _ask(path: Path) -> dict[str, Any] | None:
    """Return the reply of a process; None if it has ended, or does not answer."""
    data = b""
    try:
        with _connected(path) as connection:
            while len(data) < _MAX_BYTES and (part := connection.recv(65536)):
                data += part
        reply = json.loads(data)
    except (OSError, ValueError):
        return None
    return reply if isinstance(reply, dict) else None
