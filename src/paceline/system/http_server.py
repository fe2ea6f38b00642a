"""A small HTTP server for one page and its requests, on this machine, that survives hostile clients.

One request per connection. A limit of connections, and a deadline for every request and response, keep slow clients
from blocking others. Requests from other web sites, also through DNS rebinding, are refused.
"""

import errno
import io
import ipaddress
import json
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from paceline.system.logs import log

_MAX_CONNECTIONS = 64
_MAX_PARAMETERS = 16
_REQUEST_SECONDS = 30.0
_LINGER_SECONDS, _LINGER_BYTES = 2.0, 64 << 20  # a response is lost if the client is still sending when it is closed
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src blob: data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
    "Connection": "close",
}


class HttpError(Exception):
    """A request that is refused, with its status and the reason."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class HttpRequest:
    content_type: str
    body: bytes
    query: Mapping[str, str] = field(default_factory=dict)
    """The parameters after the question mark of the address."""


@dataclass(frozen=True)
class HttpResponse:
    content: bytes
    kind: str = "application/json"
    """The media type."""

    @classmethod
    def json(cls, value: Any) -> "HttpResponse":
        return cls(json.dumps(value, ensure_ascii=False).encode() + b"\n")


Route = Callable[[HttpRequest], HttpResponse]


@dataclass(frozen=True)
class Site:
    """The routes of a server by method and path, e.g. ("GET", "/"), and its limits."""

    routes: Mapping[tuple[str, str], Route]
    max_body: int = 0
    hosts: frozenset[str] = field(default_factory=frozenset)
    """Host names by which clients may address it, besides localhost and IP addresses."""
    seconds: float = _REQUEST_SECONDS
    """For a client to send its request, and to receive the response."""


class HttpServer(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """Serves a site at an address; port 0 is any free one. Raises OSError if it is not available."""

    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(self, host: str, port: int, site: Site):
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        except UnicodeError:  # a label is empty or too long
            raise OSError(errno.EINVAL, "not a host name") from None
        self.address_family = found[0][0]
        self.site, self._free = site, threading.BoundedSemaphore(_MAX_CONNECTIONS)
        super().__init__(found[0][4], _Handler)  # type: ignore[arg-type]

    @property
    def port(self) -> int:
        port: int = self.socket.getsockname()[1]
        return port

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
            return
        with suppress(OSError):
            request.settimeout(0.1)
            request.sendall(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing: a client that breaks a connection is not an error of the server."""


class _Received(io.RawIOBase):
    """Bytes of a client until a deadline, however slowly it sends them."""

    def __init__(self, connection: socket.socket, deadline: float):
        self._connection, self._deadline = connection, deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if (left := self._deadline - time.monotonic()) <= 0:
            raise TimeoutError
        self._connection.settimeout(left)
        return self._connection.recv_into(buffer)


class _Handler(BaseHTTPRequestHandler):
    """Handles the only request of a connection."""

    protocol_version = "HTTP/1.1"
    server_version, sys_version = "paceline", ""
    server: HttpServer

    def setup(self) -> None:
        super().setup()
        self.rfile = io.BufferedReader(_Received(self.connection, time.monotonic() + self.server.site.seconds))

    def handle(self) -> None:
        with suppress(OSError):  # the client is gone, or too slow
            self.close_connection = True
            self.handle_one_request()

    def do_GET(self) -> None:
        self._respond()

    def do_POST(self) -> None:
        self._respond()

    do_HEAD = do_GET

    def _respond(self) -> None:
        method = "GET" if self.command == "HEAD" else self.command
        try:
            path, query = self._address()
            self._check_origin()
            route = self.server.site.routes.get((method, path))
            if route is None:
                known = sorted({allowed for allowed, place in self.server.site.routes if place == path})
                if known:
                    raise HttpError(405, f"{path} allows {' and '.join(known)} only")
                raise HttpError(404, f"{path[:100]} does not exist")
            body = self._body() if method == "POST" else b""
            response, status = _respond_with(route, HttpRequest(self.headers.get("Content-Type", ""), body, query)), 200
        except HttpError as error:
            response, status = HttpResponse.json({"error": str(error)}), error.status
        except TimeoutError:
            response, status = HttpResponse.json({"error": "the request took too long"}), 408
        except OSError:  # the client is gone
            raise
        except Exception as error:  # a response, whatever happens; the server continues
            response, status = HttpResponse.json({"error": str(_failed(error))}), 500
        self._send(status, response)

    def _address(self) -> tuple[str, dict[str, str]]:
        """Return the path and the parameters of the request."""
        try:
            parts = urlsplit(self.path)
            return parts.path, dict(parse_qsl(parts.query, keep_blank_values=True, max_num_fields=_MAX_PARAMETERS))
        except ValueError:
            raise HttpError(400, "the address is not valid") from None

    def _check_origin(self) -> None:
        """Refuse names that a web site could have made up for this address, and requests from other web sites."""
        host = self.headers.get("Host", "")
        if not self._is_own(host):
            fix = "Open it by IP address, or start it with --host NAME."
            raise HttpError(421, f"{host[:100]!r} is not a name of this server. {fix}")
        if (origin := self.headers.get("Origin")) and _netloc(origin) != host:
            raise HttpError(403, "requests from other web sites are refused")

    def _is_own(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        if name == "localhost" or name in self.server.site.hosts:
            return True
        with suppress(ValueError):
            ipaddress.ip_address(name)
            return True
        return False

    def _length(self) -> int:
        text = self.headers.get("Content-Length", "")
        if self.headers.get("Transfer-Encoding") or not text:
            raise HttpError(411, "the request has no Content-Length")
        if len(self.headers.get_all("Content-Length", [])) > 1 or not (text.isascii() and text.isdecimal()):
            raise HttpError(400, "Content-Length is not a number")
        if len(text) > 18 or int(text) > self.server.site.max_body:
            raise HttpError(413, f"the content has more than {self.server.site.max_body / 1e6:g} MB")
        return int(text)

    def handle_expect_100(self) -> bool:
        """Refuse before the client sends the content."""
        try:
            self._check_origin()
            self._length()
        except HttpError as error:
            self._send(error.status, HttpResponse.json({"error": str(error)}))
            return False
        return super().handle_expect_100()

    def _body(self) -> bytes:
        length = self._length()
        body = self.rfile.read(length)
        if len(body) != length:
            raise HttpError(400, f"the request ended after {len(body)} of {length} bytes")
        return body

    def _send(self, status: int, response: HttpResponse) -> None:
        self.connection.settimeout(self.server.site.seconds)
        self.send_response(status)
        for name, value in {"Content-Type": response.kind, "Content-Length": str(len(response.content))}.items():
            self.send_header(name, value)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(response.content)
        if status >= 400:
            self._linger()

    def _linger(self) -> None:
        """Read what a refused client is still sending, within limits."""
        self.wfile.flush()
        self.connection.shutdown(socket.SHUT_WR)
        deadline, left = time.monotonic() + _LINGER_SECONDS, _LINGER_BYTES
        while left > 0 and (seconds := deadline - time.monotonic()) > 0:
            self.connection.settimeout(seconds)
            if not (received := len(self.connection.recv(1 << 16))):
                return
            left -= received

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Respond with JSON to requests that are not HTTP, as to all others."""
        self.command = getattr(self, "command", None) or "GET"
        self.request_version = "HTTP/1.1"  # HTTP/0.9 has no status
        self._send(code, HttpResponse.json({"error": message or HTTPStatus(code).phrase}))

    def log_message(self, *_words: Any) -> None:
        """Log nothing: requests are private, and clients could flood the log."""


def _respond_with(route: Route, request: HttpRequest) -> HttpResponse:
    """Return the response of a route, whose errors of the operating system are not those of the connection."""
    try:
        return route(request)
    except OSError as error:
        raise _failed(error) from None


def _failed(error: Exception) -> HttpError:
    """Log an error of this program, and return what clients may know about it."""
    log.error("a request failed", exc_info=error)
    return HttpError(500, f"internal error ({type(error).__name__})")


def _netloc(origin: str) -> str:
    """Return host and port of a web site; empty for an invalid one."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return ""
