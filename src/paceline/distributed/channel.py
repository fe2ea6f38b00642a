"""Authenticated messages between the processes of one job.

Both ends prove that they know the job's token before any message is read, and every message is signed. Other processes
can connect, but can neither send requests nor answer them.

    server -> client   greeting, 32 random bytes s
    client -> server   32 random bytes c, HMAC(token, "client" s c)
    server -> client   HMAC(token, "server" s c)
    then, both ways    length, JSON, HMAC(key of this connection and direction, message number, JSON)
"""

import hashlib
import hmac
import json
import secrets
import socket
import struct
import time
from collections.abc import Mapping
from typing import Any

from paceline.errors import UserError

TOKEN = "PACELINE_TOKEN"
"""Environment variable with the secret that the nodes of a job share."""
GREETING = b"paceline rendezvous 1\n"
NONCE = PROOF = 32
MAX_MESSAGE = 8 << 20
HANDSHAKE_TIMEOUT = 10.0
_MIN_TOKEN = 32
_HEADER = struct.Struct("!I")


class ChannelError(ConnectionError):
    """The peer is gone, does not belong to this job, or sent something that is not a message."""

    code = "rendezvous-unreachable"
    """The code of the UserError that reports it."""


class WrongPeerError(ChannelError):
    """The peer does not belong to this job, so that retrying is pointless."""

    def __init__(self, code: str, message: str):
        super().__init__(message)
        self.code = code


def new_token() -> str:
    """Return a random token for a new job."""
    return secrets.token_hex(16)


def token_of(environ: Mapping[str, str]) -> bytes:
    """Return the job's token, the shared secret of its nodes."""
    token = environ.get(TOKEN, "")
    if len(token) < _MIN_TOKEN:
        code, problem = "token-missing", "is not set"
        if token:
            code, problem = "token-too-short", f"has {len(token)} characters but needs at least {_MIN_TOKEN}"
        raise UserError(
            code,
            f"{TOKEN} {problem}. It is the secret that the nodes of a job share: run "
            f'"export {TOKEN}=$(openssl rand -hex 16)" on one node and export the same value on the others.',
        )
    return token.encode()


def sign(key: bytes, *parts: bytes) -> bytes:
    """Return the HMAC-SHA256 of the concatenated parts."""
    return hmac.digest(key, b"".join(parts), hashlib.sha256)


class Session:
    """Signs what one end of an authenticated connection sends, and verifies what it receives."""

    def __init__(self, token: bytes, server_nonce: bytes, client_nonce: bytes, is_server: bool):
        nonces = server_nonce, client_nonce
        self.client_proof, self.server_proof = sign(token, b"client", *nonces), sign(token, b"server", *nonces)
        keys = sign(token, b"to client", *nonces), sign(token, b"to server", *nonces)
        self._send_key, self._receive_key = keys if is_server else keys[::-1]
        self._sent = self._received = 0

    def pack(self, message: Any) -> bytes:
        body = json.dumps(message).encode()
        if len(body) > MAX_MESSAGE:
            raise ChannelError(f"a message of {len(body)} bytes exceeds the limit of {MAX_MESSAGE}")
        signature = sign(self._send_key, _number(self._sent), body)
        self._sent += 1
        return _HEADER.pack(len(body)) + body + signature

    @staticmethod
    def length(header: bytes) -> int:
        """Return the number of bytes that follow the header."""
        size: int = _HEADER.unpack(header)[0]
        if size > MAX_MESSAGE:
            raise ChannelError(f"the peer announces a message of {size} bytes, more than the limit of {MAX_MESSAGE}")
        return size + PROOF

    def unpack(self, signed: bytes) -> Any:
        body, signature = signed[:-PROOF], signed[-PROOF:]
        if not hmac.compare_digest(signature, sign(self._receive_key, _number(self._received), body)):
            raise ChannelError("a message has an invalid signature")
        self._received += 1
        return json.loads(body)


def _number(value: int) -> bytes:
    return value.to_bytes(8)


def connect(host: str, port: int, token: bytes, timeout: float = 30.0) -> "Channel":
    """Return a channel, retrying while the server is busy or not there yet."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            return Channel(host, port, token)
        except WrongPeerError:
            raise
        except ChannelError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


class Channel:
    """The client side of a connection."""

    def __init__(self, host: str, port: int, token: bytes, timeout: float = HANDSHAKE_TIMEOUT):
        try:
            self._socket = socket.create_connection((host, port), timeout)
        except OSError as error:
            raise ChannelError(f"{host}:{port} does not respond ({error})") from None
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        try:
            if self._read(len(GREETING)) != GREETING:
                message = f"{host}:{port} is not a Paceline rendezvous. Another program uses that port."
                raise WrongPeerError("not-a-rendezvous", message)
            self._session = self._authenticate(token, host, port)
        except BaseException:
            self.close()
            raise

    def _authenticate(self, token: bytes, host: str, port: int) -> Session:
        server_nonce, client_nonce = self._read(NONCE), secrets.token_bytes(NONCE)
        session = Session(token, server_nonce, client_nonce, is_server=False)
        self._write(client_nonce + session.client_proof)
        try:
            proof = self._read(PROOF)
        except ChannelError as error:  # a client with another token gets an invalid proof instead
            raise ChannelError(f"{host}:{port} has too many connections ({error})") from None
        if not hmac.compare_digest(proof, session.server_proof):
            message = f"{host}:{port} has another {TOKEN}. Export the same value on all nodes of the job."
            raise WrongPeerError("token-mismatch", message)
        return session

    def call(self, message: Any, timeout: float) -> Any:
        """Send a request and return the response."""
        self._socket.settimeout(timeout)
        self._write(self._session.pack(message))
        length = self._session.length(self._read(_HEADER.size))
        return self._session.unpack(self._read(length))

    def _write(self, content: bytes) -> None:
        try:
            self._socket.sendall(content)
        except OSError as error:
            raise ChannelError(str(error)) from None

    def _read(self, size: int) -> bytes:
        content = bytearray()
        while len(content) < size:
            try:
                part = self._socket.recv(size - len(content))
            except OSError as error:
                raise ChannelError(str(error)) from None
            if not part:
                raise ChannelError("the peer closed the connection")
            content += part
        return bytes(content)

    def close(self) -> None:
        self._socket.close()
