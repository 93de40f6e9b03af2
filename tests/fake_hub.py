"""A model hub on loopback that speaks as much of its HTTP as the hub's own client asks for."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Collection, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self


class FakeHub:
    """Folders as repositories. ``commits``: what each branch's name stands for, newest last;
    ``gated``: repositories that want a token. ``asked``: method and path of each request.
    """

    def __init__(self, repos: Mapping[str, Path], gated: Collection[str] = ()) -> None:
        self.repos, self.gated, self.asked = dict(repos), set(gated), list[tuple[str, str]]()
        self.licence: str | None = "apache-2.0"
        self.commits = {name: hashlib.sha1(name.encode()).hexdigest() for name in repos}
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: Any) -> None: ...

            def _send(self, code: int, body: bytes = b"", **headers: str) -> None:
                self.send_response(code)
                headers.setdefault("Content_Length", str(len(body)))
                for key, value in headers.items():
                    self.send_header(key.replace("_", "-"), value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            def _json(self, what: Any) -> None:
                self._send(200, json.dumps(what).encode(), Content_Type="application/json")

            def do_GET(self) -> None:
                path = self.path.split("?")[0]
                hub.asked.append((self.command, path))
                for name, folder in hub.repos.items():
                    api, files = f"/api/models/{name}", f"/{name}/resolve/"
                    if not path.startswith((api, files)):
                        continue
                    if name in hub.gated and "Bearer" not in self.headers.get("Authorization", ""):
                        self._send(401, X_Error_Code="GatedRepo", X_Error_Message="restricted")
                    elif path.startswith(files):
                        self._file(name, folder / path.removeprefix(files).split("/", 1)[1])
                    elif "/tree/" in path:
                        self._json([hub.entry(each) for each in sorted(folder.iterdir())])
                    elif "/revision/" in path and not path.endswith(("/main", hub.commits[name])):
                        self._send(404, X_Error_Code="RevisionNotFound")
                    else:
                        self._json(hub.about(name))
                    return
                self._send(404 if "/api/" in path else 401, X_Error_Code="RepoNotFound")

            do_HEAD = do_POST = do_GET

            def _file(self, name: str, file: Path) -> None:
                commit = hub.commits[name]
                if not file.exists():
                    self._send(404, X_Error_Code="EntryNotFound", X_Repo_Commit=commit)
                    return
                entry, data = hub.entry(file), file.read_bytes()
                headers = {"X_Repo_Commit": commit, "ETag": f'"{entry["oid"]}"'}
                if "lfs" in entry:
                    headers |= {
                        "X_Linked_Etag": f'"{entry["lfs"]["oid"]}"',
                        "X_Linked_Size": str(len(data)),
                    }
                self._send(200, data, Content_Length=str(len(data)), **headers)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def entry(self, file: Path) -> dict[str, Any]:
        """A file as the hub lists it; weights are large files there, known by their sha256."""
        data = file.read_bytes()
        git = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        found: dict[str, Any] = {"type": "file", "path": file.name, "size": len(data), "oid": git}
        if file.suffix == ".safetensors":
            found["lfs"] = {
                "oid": hashlib.sha256(data).hexdigest(),
                "size": len(data),
                "pointerSize": 135,
            }
        return found

    def about(self, name: str) -> dict[str, Any]:
        """What the hub says of a repository."""
        card = {} if self.licence is None else {"cardData": {"license": self.licence}}
        return {
            "id": name,
            "modelId": name,
            "sha": self.commits[name],
            "private": False,
            "gated": "manual" if name in self.gated else False,
            "siblings": [{"rfilename": each.name} for each in self.repos[name].iterdir()],
            "tags": [],
            "downloads": 0,
            "likes": 0,
            **card,
        }

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
