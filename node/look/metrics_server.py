"""Metrics over HTTP, in threads of the node's process. One request is answered at a time, so that
whoever asks too much costs little. Whoever has not asked by the time that others wait, too, makes
room for them: a connection that is left half-sent keeps nobody from an answer.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CONTENT_TYPE_LATEST

from ...collectives.errors import AtollError, ConfigError
from ..home.endpoint import Endpoint
from .metrics import NodeDocuments, exposition

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIEnvironment

REQUEST_S = 5.0  # without a byte of a request
MOST = 16
"""Connections without a whole request that are kept, and as many with one."""


class _MetricsRequest(WSGIRequestHandler):
    timeout = REQUEST_S

    def parse_request(self) -> bool:
        """As http.server calls it; true once the whole request is here."""
        whole = super().parse_request()
        if whole and isinstance(self.server, _MetricsListener):
            self.server.asked(self.connection)
        return whole

    def address_string(self) -> str:
        return str(self.client_address[0])

    def log_message(self, format: str, *args: Any) -> None:
        """Scrapes are no news."""


class _MetricsListener(ThreadingMixIn, WSGIServer):
    daemon_threads, block_on_close = True, False

    def __init__(self, *args: Any) -> None:
        self._silent: dict[Any, None] = {}  # connections without a whole request, oldest first
        self._asking = set[Any]()
        self._lock = threading.Lock()
        super().__init__(*args)

    def process_request(self, request: Any, client_address: Any) -> None:
        """As socketserver calls it, in the thread that accepts."""
        with self._lock:
            if len(self._silent) >= MOST:
                oldest = next(iter(self._silent))
                del self._silent[oldest]
                with suppress(OSError):  # its thread ends it
                    oldest.shutdown(socket.SHUT_RDWR)
            self._silent[request] = None
        super().process_request(request, client_address)

    def asked(self, request: Any) -> None:
        """A whole request is here. Ends it where too many are."""
        with self._lock:
            self._silent.pop(request, None)
            if len(self._asking) >= MOST:
                raise ConnectionAbortedError
            self._asking.add(request)

    def shutdown_request(self, request: Any) -> None:
        """As socketserver calls it when a connection is over."""
        with self._lock:
            self._silent.pop(request, None)
            self._asking.discard(request)
        super().shutdown_request(request)

    def server_bind(self) -> None:
        """Without the name of the host, which may take a resolver seconds to find."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_name, self.server_port = "atoll", int(self.server_address[1])
        self.setup_environ()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Whoever asked has gone, or said nothing for too long."""


class _MetricsListener6(_MetricsListener):
    address_family = socket.AF_INET6


class MetricsServer:
    """Listens once made; answers from `start` on. Raises ConfigError (E101) for a taken port."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        kind = _MetricsListener6 if ":" in endpoint.host else _MetricsListener
        try:
            self._server = kind((endpoint.host, endpoint.port), _MetricsRequest)
        except OSError as error:
            raise _no_port(endpoint, error) from None
        self._thread: threading.Thread | None = None
        self._reading = threading.Lock()

    def start(self, read: Callable[[], NodeDocuments]) -> None:
        """``read`` is called for each request, in threads of the server, one at a time; where it
        raises AtollError the answer is 503.
        """

        def answer(environ: WSGIEnvironment, respond: StartResponse) -> Iterable[bytes]:
            status, body = self._answer(environ, read)
            kind = CONTENT_TYPE_LATEST if status == "200 OK" else "text/plain; charset=utf-8"
            respond(status, [("Content-Type", kind), ("Content-Length", str(len(body)))])
            return [body]

        self._server.set_app(answer)
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="metrics", daemon=True
        )
        self._thread.start()

    def _answer(
        self, environ: WSGIEnvironment, read: Callable[[], NodeDocuments]
    ) -> tuple[str, bytes]:
        if environ.get("REQUEST_METHOD") != "GET" or environ.get("PATH_INFO") != "/metrics":
            return "404 Not Found", b"GET /metrics\n"
        if self._endpoint.local and not _names_loopback(str(environ.get("HTTP_HOST", ""))):
            # a page of elsewhere whose name was made to lead here
            return "403 Forbidden", b"ask for 127.0.0.1\n"
        try:
            with self._reading:
                return "200 OK", exposition(read())
        except AtollError as error:
            return "503 Service Unavailable", f"{error.message}\n".encode()

    def close(self) -> None:
        """Listen no more."""
        if self._thread is not None:
            self._server.shutdown()
        self._server.server_close()


def _names_loopback(host: str) -> bool:
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    try:
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _no_port(endpoint: Endpoint, error: OSError) -> ConfigError:
    taken = error.errno == errno.EADDRINUSE
    return ConfigError(
        f"cannot serve metrics at {endpoint.host}:{endpoint.port}: {error.strerror or error}",
        key="$.node.metrics",
        code="E101" if taken else "E413",
        exit_code=73 if taken else None,
        why="Another program listens there." if taken else "This machine cannot listen there.",
        hint="Another port: atoll up --metrics :9465    None: atoll config set node.metrics ''",
    )
