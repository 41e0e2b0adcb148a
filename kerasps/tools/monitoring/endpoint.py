"""An HTTP server that answers `/metrics` for Prometheus and `/status` for `kerasps top`."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

# A client that connects and sends no request holds a thread for this long.
_PATIENCE_S = 10.0

_PAGE = b"kerasps: /metrics for Prometheus, /status as JSON\n"


class Endpoint:
    """Serves a status over HTTP, from the constructor until `close`.

    There is no access control: everyone who can connect to the address can read the status, but
    nobody can change anything.

    Args:
        host: the address to listen on, or a host name.
        port: the port; 0 for a free one.
        metrics: takes the `Accept` header, and returns the content's type and the content.
        status: returns the content of `/status`, for JSON.

    Raises:
        OSError: this process cannot listen on the address.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        metrics: Callable[[str], tuple[str, bytes]],
        status: Callable[[], Mapping[str, object]],
    ) -> None:
        class Handler(_Handler):
            pages = {  # noqa: RUF012
                "/metrics": metrics,
                "/status": lambda accept: ("application/json", json.dumps(status()).encode()),
                "/": lambda accept: ("text/plain; charset=utf-8", _PAGE),
            }

        class Server(_Server):
            address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

        self._server = Server((host, port), Handler)
        self._host = host
        self.port: int = self._server.server_address[1]
        self._is_closed = False
        self._thread = threading.Thread(target=self._serve, name="kerasps-monitor", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        # Python's `serve_forever` wakes up twice a second; this sleeps until a request arrives.
        while not self._is_closed:
            self._server.handle_request()

    @property
    def address(self) -> str:
        """The `"host:port"` that it listens on."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"{host}:{self.port}"

    def close(self) -> None:
        """Close the port. A second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._server.socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Print nothing about a client that breaks off, since stderr belongs to the script."""


class _Handler(BaseHTTPRequestHandler):
    """Answers GET requests; a subclass sets the pages."""

    pages: dict[str, Callable[[str], tuple[str, bytes]]]
    timeout = _PATIENCE_S
    server_version = "kerasps"
    sys_version = ""

    def do_GET(self) -> None:
        """Send a page."""
        page = self.pages.get(self.path.partition("?")[0])
        if page is None:
            self.send_error(404, "Not Found", "Ask for /metrics or /status.")
            return
        try:
            content_type, content = page(self.headers.get("Accept", ""))
        except Exception as exc:  # such as while the cluster closes
            self.send_error(503, "No status", f"{type(exc).__name__}: {exc}")
            return
        self.send_response(200)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Write nothing, since stderr belongs to the script."""
