"""A barrier for the ranks of one node, over Unix sockets.

gloo passes each message through further threads of both ranks, which takes milliseconds while all cores compute.
Sockets wake up the rank itself, and close when a rank ends, however it ended.
"""

import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from paceline.distributed import flight_recorder
from paceline.distributed.world import World
from paceline.errors import UserError


class LocalBarrier:
    def __init__(self, world: World, folder: str):
        """Connect the ranks, through a temporary socket in a folder whose path is short."""
        self._is_rank_zero = world.is_rank_zero
        self._entered = self._passed = 0
        with _as_lost_connection():
            self._peers = _connect(world, folder)
        os.register_at_fork(after_in_child=self._close)  # otherwise a child of a dead rank keeps its sockets open
        flight_recorder.watch_also("local", "barrier", lambda: (self._entered, self._passed))

    def wait(self) -> None:
        """Wait for all ranks."""
        self._entered += 1
        with _as_lost_connection():
            if self._is_rank_zero:
                self._receive()
                self._send()
            else:
                self._send()
                self._receive()
        self._passed += 1

    def _close(self) -> None:
        for peer in self._peers:
            peer.close()

    def _send(self) -> None:
        for peer in self._peers:
            peer.sendall(b"\0")

    def _receive(self) -> None:
        for peer in self._peers:
            peer.settimeout(flight_recorder.timeout().total_seconds())
            if not peer.recv(1):
                raise ConnectionError


def _connect(world: World, folder: str) -> list[socket.socket]:
    """Connect rank 0 with each other rank."""
    if world.size == 1:
        return []
    with socket.socket(socket.AF_UNIX) as listener:
        path = world.on_rank_zero(lambda: _listen(listener, folder, world.size))
        try:
            peers = []
            if not world.is_rank_zero:
                peers.append(socket.socket(socket.AF_UNIX))
                peers[0].connect(path)
            world.barrier()  # notices a rank that ended before it connected
            if world.is_rank_zero:
                peers = [listener.accept()[0] for _ in range(world.size - 1)]
        finally:
            if world.is_rank_zero:
                shutil.rmtree(os.path.dirname(path))
    return peers


def _listen(listener: socket.socket, folder: str, size: int) -> str:
    """Listen in a new folder that other users have no access to, and return the path."""
    place = ""
    try:
        place = tempfile.mkdtemp(prefix="paceline-", dir=folder)
        path = os.path.join(place, "ranks")
        listener.bind(path)
    except OSError as error:
        shutil.rmtree(place, ignore_errors=True)
        message = f"{folder} cannot hold a socket ({error.strerror or error}). Use grad_sync.transport=network."
        raise UserError("shm-unavailable", message, path=folder) from None
    listener.listen(size)
    return path


@contextmanager
def _as_lost_connection() -> Iterator[None]:
    """Raise what torch's collectives raise, which connected() in distributed/world.py explains."""
    try:
        yield
    except TimeoutError:
        raise RuntimeError("timed out waiting for a rank of this node") from None
    except OSError as error:
        raise RuntimeError(f"connection closed by peer ({error.strerror or 'end of the other rank'})") from None
