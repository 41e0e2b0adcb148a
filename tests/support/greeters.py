"""Servers that say one thing to whoever connects, for tests of who is at an address."""

from __future__ import annotations

import contextlib
import socketserver
import threading

# The SETTINGS frame with which a server of HTTP/2 begins.
SETTINGS = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"


@contextlib.contextmanager
def greeter(words=SETTINGS, server_address=("127.0.0.1", 0), *, when=lambda: None):
    """Say `words` at an address, which is yielded, in this context.

    Args:
        when: called before it says them to a client, and returns when it may.
    """

    class Handler(socketserver.BaseRequestHandler):
        def handle(self):
            when()
            self.request.sendall(words)
            with contextlib.suppress(OSError):
                while self.request.recv(1024):
                    pass

    class Server(socketserver.ThreadingTCPServer):
        allow_reuse_address = True
        daemon_threads = True

    with Server(server_address, Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=[0.02])
        thread.start()
        try:
            yield "{}:{}".format(*server.server_address)
        finally:
            server.shutdown()
            thread.join()
