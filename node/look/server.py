"""The picture as a page: a small server on loopback, by starlette and uvicorn, in this process.

Who may see the run is who has the token. It stands behind the # of the address, which browsers send
nowhere; the page's script sends it as a header, which another site's page cannot. A request whose
Host is not this server's own is refused, so that no name elsewhere can be made to lead here (DNS
rebinding). No cookies, no inline script, nothing from any other host. The page only reads. Who has
no token makes connections in vain: those of who has it are answered (`connections`).
"""

from __future__ import annotations

import asyncio
import functools
import hmac
import secrets
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...collectives.errors import ConfigError
from ...collectives.foreign import escaped
from .connections import OWNERS, PageConnection
from .document import document
from .source import PictureSource
from .what_if import AMONG, given, what_if

HOST = "127.0.0.1"
LOOK_S, WAIT_S = 0.25, 5.0
"""How often a waiting request looks for news, and after how long it is answered without."""
MAX_SKIP = 1 << 60

FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
    "/draw.js": ("draw.js", "text/javascript"),
    "/uplot.js": ("uplot.js", "text/javascript"),
    "/uplot.css": ("uplot.css", "text/css"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
Handler = Callable[[Request], Awaitable[Response]]


class PageServer:
    """The server's answers. ``hosts``: what a request's Host may be; ``reached`` is called for each
    request that has the token.
    """

    def __init__(
        self,
        source: PictureSource,
        token: str,
        hosts: frozenset[str],
        reached: Callable[[], None] = lambda: None,
    ) -> None:
        self._source, self._token, self._hosts, self._reached = source, token, hosts, reached
        self.ending = False
        folder = Path(__file__).parent / "static"
        self._files = {
            path: ((folder / name).read_bytes(), kind) for path, (name, kind) in FILES.items()
        }

    def application(self) -> ASGIApp:
        """For any ASGI server."""
        routes = [Route(path, self._file) for path in FILES]
        routes += [
            Route("/api/run", self._secret(self._run)),
            Route("/api/what-if", self._secret(self._what_if)),
        ]
        return self._guarded(Starlette(routes=routes))

    def _guarded(self, inner: ASGIApp) -> ASGIApp:
        """Every answer, also that there is no such page or method, after the Host is checked and
        with `HEADERS`.
        """

        async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
            async def send_guarded(message: Message) -> None:
                if message["type"] == "http.response.start":
                    MutableHeaders(scope=message).update(HEADERS)
                await send(message)

            ours = Request(scope).headers.get("host", "") in self._hosts
            answer = inner if ours else Response("this is another host's name", 421)
            await answer(scope, receive, send_guarded)

        return guarded

    def _secret(self, handler: Handler) -> Handler:
        """Only for whoever has the token."""

        async def handle(request: Request) -> Response:
            given = request.headers.get("x-atoll-token", "").encode()
            if not hmac.compare_digest(given, self._token.encode()):
                return Response("the address lacks its token", 403)
            request.scope[OWNERS] = True
            self._reached()
            return await handler(request)

        return handle

    async def _file(self, request: Request) -> Response:
        body, kind = self._files[request.url.path]
        return Response(body, media_type=kind)

    async def _run(self, request: Request) -> Response:
        """The document; with ``changes``, once it has others, or after `WAIT_S`."""
        asked = {key: _count(request, key) for key in ("changes", "rounds", "lines", "losses")}
        await asyncio.to_thread(self._source.look)
        for _ in range(round(WAIT_S / LOOK_S)):
            if self._source.view.changes != asked["changes"] or self.ending:
                break
            await asyncio.sleep(LOOK_S)
        del asked["changes"]
        body = await asyncio.to_thread(self._document, asked)
        return Response(body, media_type="application/json")

    def _document(self, asked: dict[str, int]) -> bytes:
        with self._source.lock:
            found = document(self._source.view, self._source.now(), **asked)
        return msgspec.json.encode(found)

    async def _what_if(self, request: Request) -> Response:
        def found() -> dict[str, Any]:
            with self._source.lock:
                begin = given(self._source.view)
            form = {"given": begin, "among": AMONG}
            try:
                return {**form, "found": what_if({**begin, **request.query_params})}
            except ConfigError as error:
                return {**form, "error": escaped(error.message)}

        body = msgspec.json.encode(await asyncio.to_thread(found))
        return Response(body, media_type="application/json")


def _count(request: Request, key: str) -> int:
    text = request.query_params.get(key, "0")
    return min(int(text), MAX_SKIP) if text.isascii() and text.isdigit() and len(text) < 20 else 0


def serve(
    source: PictureSource, port: int, ready: Callable[[str], None], reached: Callable[[], None]
) -> None:
    """Serve until Ctrl-C. ``port``: 0 is any; ``ready`` is told the address, token included, and
    ``reached`` is called whenever somebody who has it asks. Raises ConfigError where the port is
    taken.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((HOST, port))
        except OSError as error:
            raise ConfigError(
                f"port {port} cannot be had: {error.strerror}", key="--port", hint="Leave it out."
            ) from None
        number = listening.getsockname()[1]
        token = secrets.token_urlsafe(24)
        hosts = frozenset({f"{HOST}:{number}", f"localhost:{number}"})
        page = PageServer(source, token, hosts, reached)
        config = uvicorn.Config(
            page.application(),
            log_config=None,
            access_log=False,
            server_header=False,
            lifespan="off",
            ws="none",
            http=PageConnection,
            proxy_headers=False,
            loop="asyncio",
            timeout_graceful_shutdown=2,
        )
        server = _Server(config, functools.partial(setattr, page, "ending", True))
        listening.listen(64)
        ready(f"http://{HOST}:{number}/#{token}")
        try:
            server.run(sockets=[listening])
        except KeyboardInterrupt:  # uvicorn raises it again once everything is closed
            pass


class _Server(uvicorn.Server):
    """Tells when it is to end, so that requests that wait are answered."""

    def __init__(self, config: uvicorn.Config, ending: Callable[[], None]) -> None:
        super().__init__(config)
        self._ending = ending

    def handle_exit(self, sig: int, frame: Any) -> None:
        """A signal came."""
        self._ending()
        super().handle_exit(sig, frame)
