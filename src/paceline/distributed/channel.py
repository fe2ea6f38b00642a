"""Messages between processes of one job. Both ends prove that they know the job's token before any message is read, and
every message is signed: strangers can connect, but neither ask nor answer anything.

    server -> client   greeting, 32 random bytes s
    client -> server   32 random bytes c, HMAC(token, "client" s c)
    server -> client   HMAC(token, "server" s c)
    then, both ways    length, JSON, HMAC(key of this connection and direction, number of the message, JSON)
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
_SHORTEST_TOKEN = 32
_HEADER = struct.Struct("!I")


class ChannelError(ConnectionError):
    """The other end is gone, is not of this job, or sent something that is not a message."""


class StrangerError(ChannelError):
    """Something answers that is not of this job; it will not be later either."""


def new_token() -> str:
    return secrets.token_hex(16)


def token_of(environ: Mapping[str, str]) -> bytes:
    """The job's secret as its launcher passed it on."""
    token = environ.get(TOKEN, "")
    if len(token) < _SHORTEST_TOKEN:
        found = f"has {len(token)} characters, at least {_SHORTEST_TOKEN} are needed" if token else "is not set"
        raise UserError(
            f"{TOKEN} {found}. It is the secret by which the nodes of a job recognize each other: run "
            f"`export {TOKEN}=$(openssl rand -hex 16)` on one node, and export the same value on the others"
        )
    return token.encode()


def sign(key: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, b"".join(parts), hashlib.sha256)


class Session:
    """Signs what one end of a proven connection sends, and checks what it receives."""

    def __init__(self, token: bytes, server_nonce: bytes, client_nonce: bytes, is_server: bool):
        nonces = server_nonce, client_nonce
        self.client_proof, self.server_proof = sign(token, b"client", *nonces), sign(token, b"server", *nonces)
        keys = sign(token, b"to client", *nonces), sign(token, b"to server", *nonces)
        self._send_key, self._receive_key = keys if is_server else keys[::-1]
        self._sent = self._received = 0

    def pack(self, message: Any) -> bytes:
        body = json.dumps(message).encode()
        if len(body) > MAX_MESSAGE:
            raise ChannelError(f"a message of {len(body)} bytes is too long")
        signature = sign(self._send_key, _number(self._sent), body)
        self._sent += 1
        return _HEADER.pack(len(body)) + body + signature

    @staticmethod
    def length(header: bytes) -> int:
        """Bytes that follow the header."""
        size: int = _HEADER.unpack(header)[0]
        if size > MAX_MESSAGE:
            raise ChannelError(f"a message of {size} bytes is announced")
        return size + PROOF

    def unpack(self, signed: bytes) -> Any:
        body, signature = signed[:-PROOF], signed[-PROOF:]
        if not hmac.compare_digest(signature, sign(self._receive_key, _number(self._received), body)):
            raise ChannelError("a message has a wrong signature")
        self._received += 1
        return json.loads(body)


def _number(value: int) -> bytes:
    return value.to_bytes(8)


def connect(host: str, port: int, token: bytes, within: float = 30.0) -> "Channel":
    """A channel; what is too busy or not there yet is tried again for so many seconds."""
    deadline = time.monotonic() + within
    while True:
        try:
            return Channel(host, port, token)
        except StrangerError:
            raise
        except ChannelError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


class Channel:
    """The client's end of a connection."""

    def __init__(self, host: str, port: int, token: bytes, timeout: float = HANDSHAKE_TIMEOUT):
        try:
            self._socket = socket.create_connection((host, port), timeout)
        except OSError as error:
            raise ChannelError(f"{host}:{port} does not answer ({error})") from None
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        try:
            if self._read(len(GREETING)) != GREETING:
                raise StrangerError(f"{host}:{port} is not the rendezvous of a job: something else uses that port")
            self._session = self._prove(token, host, port)
        except BaseException:
            self.close()
            raise

    def _prove(self, token: bytes, host: str, port: int) -> Session:
        server_nonce, client_nonce = self._read(NONCE), secrets.token_bytes(NONCE)
        session = Session(token, server_nonce, client_nonce, is_server=False)
        self._write(client_nonce + session.client_proof)
        stranger = f"{host}:{port} belongs to another job: {TOKEN} differs between this node and that one"
        try:
            proof = self._read(PROOF)
        except ChannelError as error:  # it has too many connections: whom it does not know gets a wrong proof
            raise ChannelError(f"{host}:{port} is too busy ({error})") from None
        if not hmac.compare_digest(proof, session.server_proof):
            raise StrangerError(stranger)
        return session

    def call(self, message: Any, timeout: float) -> Any:
        """The answer to a message."""
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
                raise ChannelError("the connection was closed")
            content += part
        return bytes(content)

    def close(self) -> None:
        self._socket.close()
