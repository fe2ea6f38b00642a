"""The nodes that train together. They join a rendezvous round; a new round begins when nodes fail, leave or join.

first round     begins when all nodes have joined, or after the join timeout if the minimum of nodes has
later rounds    begin when all live nodes have joined, or after a grace period for those that do not stop their ranks
"""

import asyncio
from dataclasses import dataclass, field

_GRACE = 60.0  # seconds to wait for a node that is alive but does not join

CLOSED, LOST = "closed", "lost"


class Refused(Exception):
    """A request that the server refuses, with the reason as its text."""


@dataclass
class _Join:
    node: str
    ranks: int
    order: int
    """The node rank that the user assigned; nodes with equal ranks are ordered by arrival."""
    minimum: int
    maximum: int
    began: "asyncio.Future[dict[str, int]]" = field(default_factory=asyncio.Future)


class Membership:
    """The rounds of a rendezvous. Not thread-safe: to be used from one event loop."""

    def __init__(self) -> None:
        self.round = 0
        self._is_closed = False
        self._alive: set[str] = set()
        self._joining: dict[str, _Join] = {}
        self._members: list[str] = []
        self._deadline: asyncio.TimerHandle | None = None
        self._deadline_passed = False
        """Whether the minimum of nodes is enough to begin."""

    async def join(
        self, node: str, ranks: int, order: int, minimum: int, maximum: int, timeout: float
    ) -> dict[str, int]:
        """Wait for the next round, and return this node's ranks in it."""
        if self._is_closed:
            raise Refused(CLOSED)
        joining = self._joining[node] = _Join(node, ranks, order, minimum, maximum)
        if not self._deadline:
            wait = _GRACE if self.round else timeout
            self._deadline = asyncio.get_running_loop().call_later(wait, self._on_deadline)
        self._begin_if_ready()
        try:
            # a round of the minimum of nodes begins at the deadline; leave it time to reach every node
            async with asyncio.timeout(timeout + 1.0):
                return await joining.began
        except TimeoutError:
            count = len(self._joining)
            raise Refused(f"only {count} of {minimum} nodes joined within {timeout:g} s") from None
        finally:
            if self._joining.get(node) is joining:
                del self._joining[node]

    def arrive(self, node: str) -> None:
        """Note that a node is connected."""
        self._alive.add(node)

    def leave(self, node: str) -> None:
        """Remove a node whose connection is lost."""
        self._alive.discard(node)
        joining = self._joining.pop(node, None)
        if joining and not joining.began.done():
            joining.began.set_exception(Refused(LOST))
        self._begin_if_ready()

    def waiting(self) -> int:
        """Return the number of nodes that need a new round; if not 0, the members of this one must join again."""
        is_broken = any(node in self._joining for node in self._members)
        has_room = any(len(self._members) < joining.maximum for joining in self._joining.values())
        return len(self._joining) if is_broken or has_room else 0

    def close(self) -> None:
        """End the rendezvous with the job: no node can join any more."""
        self._is_closed = True
        for joining in self._joining.values():
            if not joining.began.done():
                joining.began.set_exception(Refused(CLOSED))

    def _begin_if_ready(self) -> None:
        if not self._joining:
            return
        count, limits = len(self._joining), next(iter(self._joining.values()))
        all_alive = self.round > 0 and not self._alive - self._joining.keys()
        if count >= limits.maximum or (count >= limits.minimum and (all_alive or self._deadline_passed)):
            self._begin()

    def _on_deadline(self) -> None:
        self._deadline_passed = True
        self._begin_if_ready()

    def _begin(self) -> None:
        if self._deadline:
            self._deadline.cancel()
        self._deadline, self._deadline_passed = None, False
        known = {node: index for index, node in enumerate(self._members)}
        # among nodes of equal order, members of the last round come first, so that rank 0 stays on its node
        chosen = sorted(self._joining.values(), key=lambda join: (join.order, known.get(join.node, len(known))))
        chosen = chosen[: chosen[0].maximum]
        self.round += 1
        self._members = [join.node for join in chosen]
        first_rank, world_size = 0, sum(join.ranks for join in chosen)
        for number, join in enumerate(chosen):
            assignment = {"round": self.round, "node": number, "nodes": len(chosen)}
            join.began.set_result(assignment | {"first_rank": first_rank, "world_size": world_size})
            first_rank += join.ranks
            del self._joining[join.node]
