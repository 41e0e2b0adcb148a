"""Puts every task of a cluster behind a proxy that delays all bytes, as a network does."""

from __future__ import annotations

import contextlib
import copy
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

_CHUNK = 2**18


class Proxy:
    """Forwards the bytes of a new port to a task, and back, after a delay.

    It does not limit the bytes in flight. It ends with the process.

    Args:
        target: the address of a task.
        delay_s: seconds each way.
    """

    def __init__(self, target: str, delay_s: float) -> None:
        host, _, port = target.rpartition(":")
        self._target = host.strip("[]"), int(port)
        self._delay_s = delay_s
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        _start(self._accept)

    def close(self) -> None:
        """Stop accepting connections."""
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it was closed
            while True:
                near, _ = self._listener.accept()
                try:
                    far = socket.create_connection(self._target)
                except OSError:
                    near.close()  # as the task itself would refuse
                    continue
                for one, other in ((near, far), (far, near)):
                    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    waiting: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
                    _start(self._receive, one, waiting)
                    _start(self._send, waiting, other)

    def _receive(self, source: socket.socket, waiting: Any) -> None:
        data = b"?"
        while data:
            try:
                data = source.recv(_CHUNK)
            except OSError:
                data = b""
            waiting.put((time.monotonic() + self._delay_s, data))

    def _send(self, waiting: Any, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                due, data = waiting.get()
                time.sleep(max(0.0, due - time.monotonic()))
                if not data:
                    target.shutdown(socket.SHUT_WR)
                    return
                target.sendall(data)


def _start(function: Any, *arguments: Any) -> None:
    threading.Thread(target=function, args=arguments, daemon=True).start()


@contextlib.contextmanager
def delaying(delay_ms: float) -> Iterator[Callable[[dict[str, Any]], dict[str, Any]]]:
    """Yield a function that puts the workers and ps of a TF_CONFIG behind proxies, until the end.

    Args:
        delay_ms: milliseconds each way, between any two tasks.
    """
    # A thread that forwards bytes does little, and another waits for it.
    sys.setswitchinterval(1e-4)
    with contextlib.ExitStack() as stack:

        def behind_proxies(tf_config: dict[str, Any]) -> dict[str, Any]:
            changed = copy.deepcopy(tf_config)
            for job in ("worker", "ps"):
                proxies = [Proxy(a, delay_ms / 1000) for a in changed["cluster"][job]]
                for proxy in proxies:
                    stack.callback(proxy.close)
                changed["cluster"][job] = [proxy.address for proxy in proxies]
            return changed

        yield behind_proxies
