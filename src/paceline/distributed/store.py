"""The key-value store of torch's process groups: a file on one node, the rendezvous on several."""

import base64
from collections.abc import Mapping
from datetime import timedelta
from threading import Lock
from typing import Any

from torch.distributed import DistStoreError, FileStore, PrefixStore, Store

from paceline.distributed.channel import ChannelError, connect, token_of

_MARGIN = 10.0  # seconds that a response may take beyond the requested timeout
_kept: list[Store] = []  # C++ calls the Python object of a store, but does not keep it alive


class RendezvousStore(Store):
    """torch's store interface over an authenticated connection; torch's own TCPStore serves anybody who connects.

    Thread-safe: torch calls it from C++, where clones in other threads use the same connection.
    """

    def __init__(self, host: str, port: int, token: bytes, timeout: float = 30.0):
        super().__init__()
        self._lock = Lock()
        self._channel = connect(host, port, token, timeout)

    def _ask(self, action: str, timeout_seconds: float = 0.0, **request: Any) -> Any:
        with self._lock:
            try:
                answer = self._channel.call({"do": action, **request}, timeout_seconds + _MARGIN)
            except ChannelError as error:
                raise DistStoreError(f"the connection to the rendezvous is lost: {error}") from None
        if "refused" in answer:
            raise DistStoreError(answer["refused"])
        return answer["value"]

    @property
    def _seconds(self) -> float:
        seconds: float = self.timeout.total_seconds()  # type: ignore[attr-defined]
        return seconds

    def set(self, key: str, value: str | bytes) -> None:
        self._ask("set", key=key, value=_encoded(value))

    def get(self, key: str) -> bytes:
        seconds = self._seconds
        return base64.b64decode(self._ask("get", seconds, key=key, timeout=seconds))

    def add(self, key: str, value: int) -> int:
        return int(self._ask("add", key=key, amount=value))

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        expected, desired = _encoded(expected_value), _encoded(desired_value)
        return base64.b64decode(self._ask("compare_set", key=key, expected=expected, desired=desired))

    def check(self, keys: list[str]) -> bool:
        return bool(self._ask("check", keys=keys))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        seconds = timeout.total_seconds() if timeout else self._seconds
        self._ask("wait", seconds, keys=keys, timeout=seconds)

    def delete_key(self, key: str) -> bool:
        return bool(self._ask("delete", key=key))

    deleteKey = delete_key

    def num_keys(self) -> int:
        return int(self._ask("count"))

    getNumKeys = num_keys

    def has_extended_api(self) -> bool:
        return False

    def clone(self) -> "RendezvousStore":
        return self


def _encoded(value: str | bytes) -> str:
    return base64.b64encode(value.encode() if isinstance(value, str) else value).decode()


def store_at(location: str, size: int, environ: Mapping[str, str]) -> Store:
    """Return the store that the agent created for its ranks: PATH of a file, or HOST:PORT/ROUND at the rendezvous."""
    if location.startswith("/"):
        return FileStore(location, size)
    address, _, prefix = location.partition("/")
    return network_store(address, prefix, token_of(environ))


def network_store(address: str, prefix: str, token: bytes, timeout: float = 30.0) -> Store:
    """Return the store at the rendezvous, with all keys under a prefix."""
    host, _, port = address.rpartition(":")
    _kept.append(store := RendezvousStore(host, int(port), token, timeout))
    return PrefixStore(prefix, store)
