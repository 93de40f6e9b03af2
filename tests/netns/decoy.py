"""A device that says that it is a router, as media servers do, and opens no port.

    decoy.py ADDRESS

It says "ready" once it listens and ends when its stdin does.
"""

from __future__ import annotations

import socket
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

GROUP, SSDP, HTTP = "239.255.255.250", 1900, 5000


class Description(BaseHTTPRequestHandler):
    """A device without a connection to the internet."""

    def do_GET(self) -> None:
        body = b"<root><device><friendlyName>radio</friendlyName></device></root>"
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def answer(own: str, sock: socket.socket) -> None:
    """Each search, before anybody else can."""
    while True:
        _, sender = sock.recvfrom(2048)
        text = f"HTTP/1.1 200 OK\r\nLOCATION: http://{own}:{HTTP}/radio.xml\r\n\r\n"
        sock.sendto(text.encode(), sender)


def main(own: str) -> None:
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind((GROUP, SSDP))
    joined = socket.inet_aton(GROUP) + socket.inet_aton(own)
    sock.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, joined)
    server = ThreadingHTTPServer((own, HTTP), Description)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    threading.Thread(target=answer, args=(own, sock), daemon=True).start()
    print("ready", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1])
