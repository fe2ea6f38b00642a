"""Rendezvous handlers for torch's elastic agent.

torch's own keeps its state as a pickle in a store that anybody who reaches its port can write to. These read only
signed JSON, and a single node needs no network at all.
"""

import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Event, Thread
from typing import Any
from uuid import uuid4

from torch.distributed import HashStore
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from paceline.distributed.channel import Channel, ChannelError, connect
from paceline.distributed.membership import CLOSED, LOST
from paceline.distributed.store import network_store
from paceline.system.logs import log

_HEARTBEAT_INTERVAL = 0.5  # seconds
_RESPONSE_TIMEOUT = 10.0  # seconds
_NO_TORCH_STORE = RendezvousStoreInfo("", 0)


class SingleNode(RendezvousHandler):
    """A job on one node, whose ranks find each other through a file that only its user can read."""

    def __init__(self, folder: Path):
        self._folder, self._round = folder, 0

    def next_rendezvous(self) -> RendezvousInfo:
        self._round += 1
        return RendezvousInfo(HashStore(), 0, 1, _NO_TORCH_STORE)

    @property
    def rank_store(self) -> str:
        """Path of the file through which the ranks of this round find each other."""
        return str(self._folder / f"store-{self._round}")

    def get_backend(self) -> str:
        return "file"

    def get_run_id(self) -> str:
        return self._folder.name

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None: ...

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True


@dataclass(frozen=True)
class JoinTerms:
    """What a node sends when it joins."""

    ranks: int
    minimum: int
    maximum: int
    order: int = 0
    timeout: float = 300.0


class MultiNode(RendezvousHandler):
    """One node of several, which find each other at a server (server.py). A thread sends heartbeats to it."""

    def __init__(self, address: str, token: bytes, terms: JoinTerms, run_id: str):
        self._address, self._token, self._terms, self._run_id = address, token, terms, run_id
        self._node = uuid4().hex
        self._round = 0
        self._seen = {"round": 0, "waiting": 0}
        self._is_connected, self._is_over = Event(), Event()
        Thread(target=self._send_heartbeats, args=(self._arrive(terms.timeout),), daemon=True, name="heartbeat").start()

    def _connect(self, timeout: float = _RESPONSE_TIMEOUT) -> Channel:
        host, _, port = self._address.rpartition(":")
        return connect(host, int(port), self._token, timeout)

    def _arrive(self, timeout: float = 0.0) -> Channel:
        channel = self._connect(timeout)
        channel.call({"do": "arrive", "node": self._node}, _RESPONSE_TIMEOUT)
        self._is_connected.set()
        return channel

    def _send_heartbeats(self, channel: Channel) -> None:
        while not self._is_over.wait(_HEARTBEAT_INTERVAL):
            try:
                if not self._is_connected.is_set():
                    channel = self._arrive()
                self._seen = channel.call({"do": "beat"}, _RESPONSE_TIMEOUT)["value"]
            except ChannelError:
                is_elastic = self._terms.minimum < self._terms.maximum
                if is_elastic and self._is_connected.is_set() and not self._is_over.is_set():
                    log.warning("the rendezvous does not respond: training continues, but no node can join")
                self._is_connected.clear()
                channel.close()
        channel.close()

    def next_rendezvous(self) -> RendezvousInfo:
        deadline = time.monotonic() + self._terms.timeout
        while True:
            if not self._is_connected.wait(max(0.0, deadline - time.monotonic())):
                raise RendezvousConnectionError(f"{self._address} does not respond")
            answer = self._ask({"do": "join", "node": self._node} | asdict(self._terms), self._terms.timeout)
            if assignment := answer.get("value"):
                break
            if answer["refused"] == CLOSED:
                raise RendezvousClosedError
            if answer["refused"] != LOST:
                raise RendezvousTimeoutError(answer["refused"])
        self._round = assignment["round"]
        store = network_store(self._address, f"{self._round}/nodes", self._token)
        return RendezvousInfo(store, assignment["node"], assignment["nodes"], _NO_TORCH_STORE)

    def _ask(self, request: dict[str, Any], timeout: float = 0.0) -> dict[str, Any]:
        try:
            channel = self._connect()
            try:
                answer: dict[str, Any] = channel.call(request, timeout + _RESPONSE_TIMEOUT)
            finally:
                channel.close()
        except ChannelError as error:
            raise RendezvousConnectionError(str(error)) from None
        return answer

    @property
    def rank_store(self) -> str:
        """HOST:PORT/ROUND of the store through which the ranks of this round find each other."""
        return f"{self._address}/{self._round}/ranks"

    def get_backend(self) -> str:
        return "paceline"

    def get_run_id(self) -> str:
        return self._run_id

    def num_nodes_waiting(self) -> int:
        seen = self._seen
        return seen["waiting"] if seen["round"] == self._round else 0

    def is_closed(self) -> bool:
        return self._is_over.is_set()

    def set_closed(self) -> None:
        with suppress(RendezvousConnectionError):
            self._ask({"do": "close"})

    def shutdown(self) -> bool:
        self.set_closed()
        self._is_over.set()
        return True
