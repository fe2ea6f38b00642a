"""The rendezvous server of a job: the membership of its nodes, and the key-value store of its ranks.

Runs in a thread of node 0 or in a separate process (`paceline rendezvous`), and listens at one address only.
"""

import asyncio
import base64
import contextlib
import errno
import hmac
import os
import secrets
import signal
import socket
from collections.abc import Awaitable, Callable
from threading import Thread
from typing import Any

from paceline.distributed.channel import GREETING, HANDSHAKE_TIMEOUT, NONCE, PROOF, ChannelError, Session, token_of
from paceline.distributed.membership import Membership, Refused
from paceline.errors import UserError

_MAX_UNAUTHENTICATED = 64  # connections that have not authenticated yet
_MAX_KEYS, _MAX_VALUE = 1 << 20, 1 << 20
_HEARTBEAT_TIMEOUT = 5.0  # seconds without a heartbeat, after which a node is considered failed


class Server:
    """Answers the authenticated requests of nodes and ranks."""

    def __init__(self, address: str, port: int, token: bytes):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, port), family=family, backlog=256)
        self._token = token
        self._members = Membership()
        self._values: dict[str, bytes] = {}
        self._awaited: dict[str, asyncio.Event] = {}
        self._unauthenticated: dict[asyncio.StreamWriter, None] = {}
        self._actions: dict[str, Callable[..., Awaitable[Any]]] = {
            name.removeprefix("_do_"): getattr(self, name) for name in dir(self) if name.startswith("_do_")
        }

    @property
    def port(self) -> int:
        """The port that it listens at."""
        port: int = self._listener.getsockname()[1]
        return port

    def start(self) -> None:
        """Serve in a daemon thread, for as long as this process lives."""
        Thread(target=asyncio.run, args=(self.serve(),), daemon=True, name="rendezvous").start()

    async def serve(self) -> None:
        """Serve until cancelled."""
        server = await asyncio.start_server(self._handle, sock=self._listener)
        async with server:
            await server.serve_forever()

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._unauthenticated[writer] = None
        if len(self._unauthenticated) > _MAX_UNAUTHENTICATED:
            # drop the oldest, because a client that knows the token authenticates at once
            oldest = next(iter(self._unauthenticated))
            del self._unauthenticated[oldest]
            oldest.transport.abort()
        # an invalid request ends only the connection that it came from
        with contextlib.suppress(OSError, EOFError, ValueError, KeyError, TypeError, TimeoutError):
            try:
                async with asyncio.timeout(HANDSHAKE_TIMEOUT):
                    session = await self._authenticate(reader, writer)
            finally:
                self._unauthenticated.pop(writer, None)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            await self._respond(session, reader, writer)
        writer.transport.abort()

    async def _authenticate(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Session:
        server_nonce = secrets.token_bytes(NONCE)
        writer.write(GREETING + server_nonce)
        answer = await reader.readexactly(NONCE + PROOF)
        session = Session(self._token, server_nonce, answer[:NONCE], is_server=True)
        if not hmac.compare_digest(answer[NONCE:], session.client_proof):
            writer.write(secrets.token_bytes(PROOF))  # tells a wrong token from a connection that was dropped
            await writer.drain()
            writer.close()
            raise ChannelError("wrong token")
        writer.write(session.server_proof)
        return session

    async def _respond(self, session: Session, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        node = ""
        try:
            while True:
                async with asyncio.timeout(_HEARTBEAT_TIMEOUT if node else None):
                    request = session.unpack(await reader.readexactly(session.length(await reader.readexactly(4))))
                action = request.pop("do")
                if action == "arrive":
                    node = request["node"]
                try:
                    answer = {"value": await self._actions[action](**request)}
                except Refused as refusal:
                    answer = {"refused": str(refusal)}
                writer.write(session.pack(answer))
                await writer.drain()
        finally:
            if node:
                self._members.leave(node)

    # the requests of clients

    async def _do_arrive(self, node: str) -> None:
        """Tie the node to this connection: it is lost when the connection ends or its heartbeats stop."""
        self._members.arrive(node)

    async def _do_beat(self) -> dict[str, int]:
        """Return the current round, and how many nodes need a new one."""
        return {"round": self._members.round, "waiting": self._members.waiting()}

    async def _do_join(self, **terms: Any) -> dict[str, int]:
        assignment = await self._members.join(**terms)
        for key in [key for key in self._values if int(key.partition("/")[0]) < assignment["round"] - 1]:
            del self._values[key]
        return assignment

    async def _do_close(self) -> None:
        self._members.close()

    async def _do_set(self, key: str, value: str) -> None:
        self._put(key, base64.b64decode(value))

    async def _do_get(self, key: str, timeout: float) -> str:
        await self._do_wait([key], timeout)
        return base64.b64encode(self._values[key]).decode()

    async def _do_add(self, key: str, amount: int) -> int:
        total = int(self._values.get(key, b"0")) + amount
        self._put(key, b"%d" % total)
        return total

    async def _do_compare_set(self, key: str, expected: str, desired: str) -> str:
        now = self._values.get(key)
        if now == base64.b64decode(expected) or (now is None and not expected):
            self._put(key, base64.b64decode(desired))
        return base64.b64encode(self._values.get(key, b"")).decode()

    async def _do_check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    async def _do_wait(self, keys: list[str], timeout: float) -> None:
        try:
            async with asyncio.timeout(timeout):
                for key in keys:
                    while key not in self._values:
                        await self._awaited.setdefault(key, asyncio.Event()).wait()
        except TimeoutError:
            missing = next(key for key in keys if key not in self._values)
            raise Refused(f"timed out waiting for {missing}") from None

    async def _do_delete(self, key: str) -> bool:
        return self._values.pop(key, None) is not None

    async def _do_count(self) -> int:
        return len(self._values)

    def _put(self, key: str, value: bytes) -> None:
        int(key.partition("/")[0])  # every key belongs to a round
        if len(value) > _MAX_VALUE or len(self._values) >= _MAX_KEYS:
            raise ValueError("the store is full")
        self._values[key] = value
        if event := self._awaited.pop(key, None):
            event.set()


def serve(address: str, port: int) -> None:
    """Serve the rendezvous until SIGINT or SIGTERM."""
    try:
        server = Server(address, port, token_of(os.environ))
    except OSError as error:
        raise port_unavailable(address, port, error, "choose another --port") from None
    print(f"rendezvous at {address}:{server.port}", flush=True)
    asyncio.run(_serve_until_signal(server))


def port_unavailable(address: str, port: int, error: OSError, fix: str) -> UserError:
    """Return the error for a port that cannot be listened at."""
    if error.errno == errno.EADDRINUSE:
        fix = f"stop the process that uses it, or {fix}"
    elif error.errno in (errno.EACCES, errno.EPERM):
        fix = f"ports below 1024 are reserved for root: {fix}"
    return UserError(
        "port-unavailable",
        f"cannot listen on port {port} of {address} ({error.strerror}). {fix[0].upper()}{fix[1:]}.",
        address=address,
        port=port,
    )


async def _serve_until_signal(server: Server) -> None:
    serving = asyncio.ensure_future(server.serve())
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, serving.cancel)
    await asyncio.wait([serving])
